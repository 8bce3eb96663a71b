"""Runs the tests with every torch that is claimed, and writes down what passed.

    python tools/matrix.py [NAME ...] [--folder .matrix] [--rebuild]

Each environment is built once, in a folder of its own, and kept. What came out is in
docs/support.json, of which tools/support_table.py makes the tables in README and docs.
A CUDA build of torch takes some gigabytes and runs on the processor as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "support.json"
# What make quick runs.
QUICK = (
    "tests/trackers",
    "tests/samples",
    "tests/test_filter.py",
    "tests/numerics",
    "tests/compression",
)
INTEGRATIONS = ("tests/integrations", "tests/privacy/test_filter.py")
SHOWN = ("torch", "lightning", "transformers", "accelerate", "opacus", "peft", "numpy")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "safetensors", "setuptools<81")
EXTRAS = ("privacy", "lightning", "transformers", "accelerate", "lora", "curvature")
# Other people's advice on their next version is not ours to follow in an old one;
# what is said of our own lines stays an error.
WARNINGS = """
error
ignore::DeprecationWarning
ignore::FutureWarning
ignore::PendingDeprecationWarning
error::DeprecationWarning:dome
error::FutureWarning:dome
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A set of versions to run with.

    Attributes:
        torch: Its version.
        others: "oldest", the lower bounds of pyproject.toml; "newest", whatever pip
            finds; "none", torch and Opacus alone; "development", the environment that
            make builds from constraints.txt.
    """

    torch: str
    others: str

    @property
    def suites(self) -> dict[str, Sequence[str]]:
        """Tests to run, by name."""
        both = {"quick": QUICK, "integrations": INTEGRATIONS}
        return {"quick": QUICK} if self.others == "none" else both


ENVIRONMENTS = {
    "oldest": Environment("2.6.0", "oldest"),
    "2.8": Environment("2.8.0", "none"),
    "2.10": Environment("2.10.0", "none"),
    "development": Environment("2.13.0", "development"),
    "newest": Environment("2.15.0", "newest"),
}


def main() -> None:
    """Build, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="environments; all if none is named")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    parser.add_argument("--rebuild", action="store_true", help="install anew")
    parser.add_argument("--suite", help="this suite only, and nothing is written")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"no environment {unknown}: choose from {', '.join(ENVIRONMENTS)}")
    failed = False
    for name in arguments.names or ENVIRONMENTS:
        chosen = ENVIRONMENTS[name]
        python = built(name, chosen, arguments.folder, arguments.rebuild)
        suites = {
            suite: run(python, paths, arguments.folder / f"{name}-{suite}.xml")
            for suite, paths in chosen.suites.items()
            if arguments.suite in (None, suite)
        }
        print(name, json.dumps(suites))
        failed |= any(result["failed"] for result in suites.values())
        if arguments.suite is None:
            write(name, {**versions(python), "suites": suites})
    sys.exit(failed)


def built(name: str, chosen: Environment, folder: Path, anew: bool) -> Path:
    """The Python of an environment, which is made if it is not there."""
    if chosen.others == "development":
        return ROOT / ".venv" / "bin" / "python"
    home = folder / name
    python, stamp = home / "bin" / "python", home / "requirements.txt"
    wanted = "\n".join(requirements(chosen))
    if not anew and stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(home, with_pip=True, clear=True)
    install = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    subprocess.run([*install, *requirements(chosen)], check=True)
    stamp.write_text(wanted)
    return python


def requirements(chosen: Environment) -> list[str]:
    """What pip is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = f"torch=={chosen.torch}"
    ranges = sorted(
        {r for e in EXTRAS for r in project["optional-dependencies"][e] if ">=" in r}
    )
    if chosen.others == "none":
        ranges = [r for r in ranges if r.startswith("opacus")]
    elif chosen.others == "oldest":
        # The bound below which nothing is promised is itself promised.
        ranges = [r.partition(",")[0].replace(">=", "==") for r in ranges]
    return [torch, *ranges, *TOOLS]


def run(python: Path, paths: Sequence[str], report: Path) -> dict[str, int]:
    """Numbers of tests that passed, failed and were skipped."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [
        *(str(python), "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"),
        *("-m", "not slow and not gpu", "-o", f"filterwarnings={WARNINGS}"),
        *(f"--junitxml={report}", *paths),
    ]
    paths_of_ours = os.pathsep.join([str(ROOT / "src")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths_of_ours}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    all_, failures, errors, skipped = (
        int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": all_ - failed - skipped, "failed": failed, "skipped": skipped}


def versions(python: Path) -> dict[str, object]:
    """Of Python, and of the packages that are there."""
    code = (
        "import json, platform\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "found = {}\n"
        f"for name in {SHOWN!r}:\n"
        "    try:\n        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n        pass\n"
        "print(json.dumps({'python': platform.python_version(), 'packages': found}))"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def write(name: str, result: dict[str, object]) -> None:
    """Put one environment's result beside the others'."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    environments = known.get("environments", {}) | {name: result}
    known["environments"] = {
        n: environments[n] for n in ENVIRONMENTS if n in environments
    }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
