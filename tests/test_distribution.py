import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ASSETS = sorted(path.name for path in (ROOT / "src/dome_lab/report/assets").iterdir())
pytestmark = pytest.mark.slow

TRAIN = """
import torch
from sklearn.datasets import load_digits
import dome
x, y = (torch.tensor(a[:64]) for a in load_digits(return_X_y=True))
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
grad_filter = dome.attach(model, optimizer, rank=9)
before = model.weight.detach().clone()
torch.nn.functional.cross_entropy(model(x.float() / 16), y).backward()
optimizer.step()
assert 0 < grad_filter.stats.kept_norm < 1
assert not torch.equal(model.weight, before)
print(dome.__file__)
"""


def run(*command, cwd=ROOT):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made from it; those of ``make dist``."""
    given = os.environ.get("DOME_DIST")
    folder = ROOT / given if given else tmp_path_factory.mktemp("dist")
    if not given:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[1]) as archive:
        (place,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        return Parser().parsestr(archive.read(place).decode())


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """A new environment with the wheel; torch and others are those of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    inside = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=inside))
    # Only adds the folder: what is installed there as editable, dome too, is not found.
    others = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(others + "\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(
        *pip,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        built[1],
    )
    return folder


def test_wheel_and_sdist_have_the_page_of_the_report(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    with tarfile.open(sdist) as archive:
        sources = [name.split("/", 1)[-1] for name in archive.getnames()]
    assert ASSETS
    for asset in ASSETS:
        assert f"dome_lab/report/assets/{asset}" in names
        assert f"src/dome_lab/report/assets/{asset}" in sources
    assert "dome/py.typed" in names
    assert {"README.md", "LICENSE", "zensical.toml", "pyproject.toml"} <= set(sources)
    assert not [name for name in names if not name.startswith("dome")]


def test_the_metadata_names_version_authors_paper_and_keywords(metadata):
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {metadata['Version']}\n" in citation
    assert "arXiv:2507.03545" in citation
    assert metadata["Author"] == "The DOME developers"
    assert metadata["Project-URL"] == "Paper, https://arxiv.org/abs/2507.03545"
    assert len(metadata["Keywords"].split(",")) > 4


def test_no_link_of_the_description_leads_nowhere_on_an_index_page(metadata):
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "dome.attach(model, optimizer, rank=" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert all(target.startswith("https://") for target in targets)


def test_links_of_the_description_are_absolute_once_the_source_has_an_address():
    sys.path.insert(0, str(ROOT / "tools"))
    from readme import for_index

    text = "![P](docs/p.png)\n\n[a](docs/a.md#b) [c](https://example.org)\n"
    assert for_index(text, None) == "a (`docs/a.md`) [c](https://example.org)\n"
    at = "https://example.org/dome"
    assert for_index(text, at) == (
        f"![P]({at}/raw/main/docs/p.png)\n\n"
        f"[a]({at}/blob/main/docs/a.md#b) [c](https://example.org)\n"
    )


def test_the_pinned_versions_are_within_the_ranges_of_every_extra(metadata):
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    )
    pins = {_plain(name): pinned for name, pinned in pins.items()}
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"lab", "privacy", "lightning", "transformers", "docs", "dev"} <= extras
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if requirement.name == metadata["Name"]:
            assert requirement.extras <= extras
        else:
            assert requirement.specifier.contains(pins[_plain(requirement.name)])


def test_the_command_answers_in_a_fresh_environment(fresh, tmp_path):
    dome = fresh / "bin" / "dome"
    assert re.fullmatch(r"dome \d+\.\d+\.\d+\n", run(dome, "--version", cwd=tmp_path))
    assert "reproduce" in run(dome, "--help", cwd=tmp_path)


def test_the_command_writes_a_report_in_a_fresh_environment(fresh, tmp_path):
    rows = [
        {"seed": seed, "step": i, "train_loss": 1.0 / (i + 1)}
        for seed in (0, 1)
        for i in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(fresh / "bin" / "dome", "report", "rows.jsonl", cwd=tmp_path)
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_step_on_digits_in_a_fresh_environment(fresh, tmp_path):
    where = run(fresh / "bin" / "python", "-c", TRAIN, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(fresh)


OTHER = {
    "dome/__init__.py": "from . import dome as _dome\n",
    "dome/dome.py": "from dome.utils import escape\n",
    "dome/utils.py": "def escape(text): return text\n",
}


def other_dome(folder):
    """A wheel like the one of the package that is named ``dome`` on the index."""
    info = "dome-0.0.3.dist-info"
    files = OTHER | {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: dome\nVersion: 0.0.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / "dome-0.0.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return wheel


def failure(*command, cwd):
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode
    return done.stderr


def installed(folder, *wheels):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    for wheel in wheels:
        # --target replaces nothing that is there: unpack as an installation would.
        run(*pip, "--no-index", "--target", folder / wheel.stem, wheel)
        shutil.copytree(folder / wheel.stem, folder / "site", dirs_exist_ok=True)
    return folder / "site"


def test_files_of_the_other_dome_in_ours_are_refused_at_import(built, tmp_path):
    site = installed(tmp_path, other_dome(tmp_path), built[1])
    told = failure(sys.executable, "-c", "import dome", cwd=site)
    assert "files of another package named dome (dome.py, utils.py)" in told
    assert "pip uninstall dome dome-torch" in told


def test_the_command_says_that_the_other_dome_took_its_place(built, tmp_path):
    site = installed(tmp_path, built[1], other_dome(tmp_path))
    told = failure(sys.executable, "-m", "dome_lab", "--help", cwd=site)
    assert "belongs to another package named dome" in told


def test_the_example_of_the_sdist_runs_in_a_fresh_environment(fresh, built, tmp_path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (example,) = tmp_path.glob("*/examples/quickstart.py")
    assert "accuracy" in run(fresh / "bin" / "python", example, cwd=tmp_path)


def test_the_workflow_checks_every_python_that_is_claimed(metadata):
    workflow = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    claimed = re.findall(
        r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier"))
    )
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert re.findall(r"[\d.]+", matrix) == claimed
    assert "make check" in workflow


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()
