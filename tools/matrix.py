"""Runs the tests with every torch that is claimed, and writes down what passed.

    python tools/matrix.py [NAME ...] [--suite quick] [--folder ...] [--rebuild]

Each environment is built once, in a folder of its own, and kept. What came out is in
docs/reference/support.json; tools/support_table.py makes tables of it.
A CUDA build of torch takes some gigabytes and runs on the processor as well.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from features import ROWS, counted, files_of, outcomes_in, summed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "reference" / "support.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dome-matrix"
# What make quick runs.
QUICK = (
    "tests/trackers",
    "tests/samples",
    "tests/test_filter.py",
    "tests/compression",
)
INTEGRATIONS = ("tests/integrations", "tests/privacy/test_filter.py")
SUITES = {"quick": QUICK, "integrations": INTEGRATIONS}
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
ignore:Guards may run slower on Python:RuntimeWarning
error::DeprecationWarning:dome
error::FutureWarning:dome
"""

Outcomes = dict[str, str]  # by test: passed, failed, skipped


@dataclass(frozen=True, slots=True)
class Environment:
    """A set of versions to run with.

    Attributes:
        python: Its version, as in ``python3.11``.
        torch: Its version.
        others: "oldest", the lower bounds of pyproject.toml; "newest", whatever pip
            finds; "none", torch and Opacus alone; "development", the environment that
            make builds from constraints.txt.
    """

    python: str
    torch: str
    others: str

    @property
    def suites(self) -> tuple[str, ...]:
        """Tests to run, by name."""
        return ("quick",) if self.others == "none" else tuple(SUITES)


ENVIRONMENTS = {
    "oldest": Environment("3.11", "2.8.0", "oldest"),
    "2.8": Environment("3.12", "2.8.0", "none"),
    "2.10": Environment("3.13", "2.10.0", "none"),
    "development": Environment("3.11", "2.13.0", "development"),
    "newest": Environment("3.11", "2.15.0", "newest"),
}


def main() -> None:
    """Build, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="environments; all if none is named")
    parser.add_argument("--folder", type=Path, default=CACHE)
    parser.add_argument("--rebuild", action="store_true", help="install anew")
    parser.add_argument("--suite", help="this suite only, and nothing is written")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--report",
        type=Path,
        help="a junit file of all tests in the environment of development",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"no environment {unknown}: choose from {', '.join(ENVIRONMENTS)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in arguments.names or ENVIRONMENTS:
        with alone(arguments.folder / f"{name}.lock"):
            failed |= not passes(name, arguments)
    sys.exit(failed)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait for whoever builds or uses the same environment."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def passes(name: str, arguments: argparse.Namespace) -> bool:
    """Run the tests of an environment; whether none of them failed."""
    chosen = ENVIRONMENTS[name]
    interpreter = interpreter_of(chosen.python)
    if interpreter is None and arguments.suite is None:
        print(f"{name}: no python{chosen.python} here, so nothing can be said of it")
        return False
    # A look at one suite claims nothing of a Python: any will do.
    interpreter = interpreter or sys.executable
    python = built(name, interpreter, arguments.folder, arguments.rebuild)
    reports = arguments.folder / "reports"
    reports.mkdir(exist_ok=True)

    def run(suite: str, paths: Sequence[str], marks: str, words: str = "") -> Outcomes:
        report = reports / f"{name}-{suite}.xml"
        chosen_tests = ["-m", marks, "-k", words, f"--junitxml={report}", *paths]
        return run_tests(python, chosen_tests, report, arguments.processes)

    if arguments.report is not None and chosen.others == "development":
        outcomes = of_report(arguments.report, chosen.suites)
    else:
        outcomes = {
            suite: run(suite, SUITES[suite], "not slow and not gpu")
            for suite in chosen.suites
            if arguments.suite in (None, suite)
        }
        if chosen.others == "development" and arguments.suite in (None, "features"):
            outcomes |= feature_outcomes(run)
    suites = {suite: summed(found) for suite, found in outcomes.items()}
    print(name, json.dumps(suites), flush=True)
    if arguments.suite is None:
        found = {**versions(python), "suites": suites}
        if "features" in outcomes:
            whole = {n: kind for some in outcomes.values() for n, kind in some.items()}
            found["features"] = {row.name: counted(row, whole) for row in ROWS}
        write(name, found)
    return not any(result["failed"] for result in suites.values())


def feature_outcomes(run: Callable[..., Outcomes]) -> dict[str, Outcomes]:
    """What became of the tests of the rows of the support table."""
    named = [row for row in ROWS if row.words and not row.gpu]
    words = " or ".join(sorted({word for row in named for word in row.words}))
    device = files_of((row for row in ROWS if row.gpu), ROOT)
    return {
        "features": run("features", files_of(named, ROOT), "not gpu", words),
        "device": run("device", device, ""),
    }


def of_report(report: Path, suites: Sequence[str]) -> dict[str, Outcomes]:
    """The same, of a run of all tests that has been made already."""
    whole = outcomes_in(report)

    def within(paths: Sequence[str]) -> Outcomes:
        return {n: kind for n, kind in whole.items() if n.startswith(tuple(paths))}

    return {suite: within(SUITES[suite]) for suite in suites} | {"features": whole}


def built(name: str, interpreter: str, folder: Path, anew: bool) -> Path:
    """The Python of an environment, which is made if it is not there."""
    chosen = ENVIRONMENTS[name]
    if chosen.others == "development":
        return ROOT / ".venv" / "bin" / "python"
    home = folder / name
    python, stamp = home / "bin" / "python", home / "requirements.txt"
    wanted = "\n".join([interpreter, *requirements(chosen)])
    kept = stamp.exists() and stamp.read_text() == wanted
    if kept and not anew and runs(python, "import pytest, torch"):
        return python
    print(f"Installing torch {chosen.torch} into {home} (some minutes) ...", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, *requirements(chosen)], check=True)
    stamp.write_text(wanted)  # last: what is half installed is installed again
    return python


def interpreter_of(version: str) -> str | None:
    """A Python of this version that runs, if there is one."""
    # Where this one is from, and not the copy in some clone's environment.
    own = Path(sys.base_prefix, "bin", f"python{version}")
    found = str(own) if own.exists() else shutil.which(f"python{version}")
    # A manager of versions may put a name there that only says how to choose one.
    return found if found and runs(found, "") else None


def runs(python: str | Path, code: str) -> bool:
    """Whether a Python gets through some code."""
    command = [str(python), "-c", code]
    return not subprocess.run(command, capture_output=True, check=False).returncode


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


def run_tests(
    python: Path, tests: Sequence[str], report: Path, processes: int
) -> Outcomes:
    """Run some tests; what became of each of them."""
    report.unlink(missing_ok=True)
    command = [
        *(str(python), "-m", "pytest", "-n", str(processes), "--dist", "loadfile"),
        *("-q", "-p", "no:cacheprovider", "-o", f"filterwarnings={WARNINGS}", *tests),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return outcomes_in(report)


def versions(python: Path) -> dict[str, object]:
    """Of Python and of the packages that are there, and the GPU if there is one."""
    code = (
        "import json, platform\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "import torch\n"
        "found = {}\n"
        f"for name in {SHOWN!r}:\n"
        "    try:\n        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n        pass\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None\n"
        "print(json.dumps({'python': platform.python_version(), 'gpu': gpu,\n"
        "                  'packages': found}))"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    )
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", **json.loads(done.stdout)}


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
