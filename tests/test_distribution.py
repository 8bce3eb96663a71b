import json
import os
import re
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
    """The sdist, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


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


def test_the_pinned_versions_are_within_the_ranges_of_every_extra(built):
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    )
    pins = {_plain(name): pinned for name, pinned in pins.items()}
    with zipfile.ZipFile(built[1]) as archive:
        (place,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(place).decode())
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


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()
