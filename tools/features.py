"""The rows of the support table: what each is called, and which tests stand for it.

A row's state is what became of its tests, which are found by file and by words in
their names. A test whose name says that something is refused stands for a refusal: when
the feature gets tests of its own, its row follows.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REFUSAL = re.compile(r"refus|reported_by_name")
# Of a whole run that ended before it could write what became of its tests.
NO_REPORT = "the report"


@dataclass(frozen=True, slots=True)
class Row:
    """A feature.

    Attributes:
        name: As the table says it.
        paths: Where its tests are: patterns below the project's folder.
        words: An expression that is found in the names of its tests.
        gpu: Whether they need one.
    """

    name: str
    paths: tuple[str, ...] = ()
    words: str = ""
    gpu: bool = False


SAMPLES = "tests/samples/**/test_*.py"
WORKERS = "tests/distributed/test_*.py"
DEVICE = "tests/device/test_*.py"

ROWS = (
    Row("CPU", ("tests/trackers", "tests/samples", "tests/test_filter.py")),
    Row("CUDA, simulated on the CPU", (DEVICE,)),
    Row("CUDA", (DEVICE,), gpu=True),
    Row("MPS, XPU"),
    Row("`DistributedDataParallel` over gloo", (WORKERS,), r"(two|three)_workers"),
    Row("`DistributedDataParallel` over nccl", (DEVICE,), "nccl", gpu=True),
    Row(
        "FSDP2 (`fully_shard`)", (SAMPLES, WORKERS), r"fsdp2|fully_shard|sharded_model"
    ),
    Row("FSDP (the first)", (SAMPLES, WORKERS), r"fsdp(?!2)(?!\.py)"),
    Row("tensor parallelism", (SAMPLES, WORKERS), r"tensor_parallel|dtensor"),
    Row("activation checkpointing", (SAMPLES,), r"checkpoint(ed|ing)"),
    Row("`torch.compile`", (SAMPLES, "tests/integrations"), "compile"),
    Row("autocast to bfloat16", (SAMPLES, "tests/integrations"), "autocast"),
    Row(
        "`GradScaler`, on the CPU",
        (SAMPLES, "tests/test_filter.py", "tests/integrations"),
        "scaler|scaled_loss",
    ),
    Row("autocast to float16 with a `GradScaler`, CUDA", (DEVICE,), "scaler", gpu=True),
)


def test_paths(root: Path, *, gpu: bool) -> list[str]:
    """Files and folders of the tests of these rows."""
    patterns = {p for row in ROWS if row.gpu == gpu for p in row.paths}
    found = {path for pattern in patterns for path in root.glob(pattern)}
    # A file inside a folder that is named too would be run twice.
    inside = {path for path in found if any(up in found for up in path.parents)}
    return sorted(str(path.relative_to(root)) for path in found - inside)


def outcomes_in(report: Path) -> dict[str, str]:
    """What became of each test of a junit file: "passed", "failed" or "skipped"."""
    if not report.exists():
        return {NO_REPORT: "failed"}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        found[name] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
    return found


def counted(row: Row, outcomes: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """How many of its tests passed, failed, were skipped: those of use, of refusal."""
    if not row.paths:
        return {"works": summed({}), "refused": summed({})}
    mine = {name: kind for name, kind in outcomes.items() if belongs(row, name)}
    refusals = {name for name in mine if REFUSAL.search(name)} if row.words else set()
    return {
        "works": summed({n: kind for n, kind in mine.items() if n not in refusals}),
        "refused": summed({n: kind for n, kind in mine.items() if n in refusals}),
    }


def belongs(row: Row, name: str) -> bool:
    """Whether a test is one of a row's."""
    if name == NO_REPORT:
        return True
    file = Path(name.partition("::")[0])
    inside = any(
        file.is_relative_to(p) if "*" not in p else matches(file, p) for p in row.paths
    )
    return inside and re.search(row.words, name) is not None


def matches(file: Path, pattern: str) -> bool:
    """Whether a file is one that a pattern finds, folders in between included."""
    folder, _, name = pattern.rpartition("/")
    start = folder.removesuffix("/**")
    return file.is_relative_to(start) and file.match(name)


def summed(outcomes: Mapping[str, str]) -> dict[str, int]:
    """How many tests there were of each kind."""
    kinds = list(outcomes.values())
    return {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}
