"""The rows of the support table: what each is called, and which tests stand for it.

A row's state is what became of its tests, which are found by file and by words in
their names. A test whose name says that something is refused stands for a refusal: when
the feature gets tests of its own, its row follows.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A test on a real GPU: in the file of those, or with its device as a parameter.
ON_GPU = re.compile(r"/test_cuda\.py::|[\[-]cuda[\]-]")
REFUSAL = re.compile(r"refus|reported_by_name")
# Of a whole run that ended before it could write what became of its tests.
NO_REPORT = "the report"


@dataclass(frozen=True, slots=True)
class Row:
    """A feature.

    Attributes:
        name: As the table says it.
        paths: Where its tests are: patterns below the project's folder.
        words: Its tests have one of these in their names; all have, if there are none.
        gpu: Whether they need one.
    """

    name: str
    paths: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    gpu: bool = False


SAMPLES = "tests/samples/**/test_*.py"
WORKERS = "tests/distributed/test_*.py"
TRAINERS = "tests/integrations/test_*.py"
FILTER = "tests/test_filter.py"
DEVICE = "tests/device/test_*.py"

ROWS = (
    Row("CPU", ("tests/trackers/test_*.py", SAMPLES, FILTER)),
    Row("CUDA, simulated on the CPU", (DEVICE,)),
    Row("CUDA", (DEVICE,), gpu=True),
    Row("MPS, XPU"),
    Row(
        "`DistributedDataParallel` over gloo", (WORKERS,), ("two_workers", "three_work")
    ),
    Row("`DistributedDataParallel` over nccl", (DEVICE,), ("nccl",), gpu=True),
    Row("FSDP2 (`fully_shard`)", (SAMPLES, WORKERS), ("fsdp2", "fully_shard")),
    Row("FSDP, the first", (SAMPLES, WORKERS), ("fsdp-", "first_fsdp")),
    Row("tensor parallelism", (SAMPLES, WORKERS), ("tensor_parallel", "dtensor")),
    Row(
        "activation checkpointing",
        (SAMPLES, TRAINERS),
        ("checkpointing", "inside_a_checkpoint", "into_a_checkpoint"),
    ),
    Row("`direction_rank`", ("tests/test_direction_rank.py",)),
    Row("`stream=True`", ("tests/test_stream*.py",)),
    Row("`torch.compile`", (SAMPLES, TRAINERS), ("compile",)),
    Row("autocast to bfloat16", (SAMPLES, TRAINERS), ("autocast",)),
    Row(
        "`GradScaler`, on the CPU",
        (SAMPLES, FILTER, TRAINERS),
        ("scaler", "scaled_loss"),
    ),
    Row(
        "autocast to float16 with a `GradScaler`, CUDA",
        (DEVICE,),
        ("scaler",),
        gpu=True,
    ),
)


def files_of(rows: Iterable[Row], root: Path) -> list[str]:
    """Files with the tests of some rows."""
    patterns = {pattern for row in rows for pattern in row.paths}
    found = {path for pattern in patterns for path in root.glob(pattern)}
    return sorted(str(path.relative_to(root)) for path in found)


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
    """Whether a test is one of a row's, by its file and by words in both names."""
    if name == NO_REPORT:
        return True
    file = name.partition("::")[0]
    inside = any(is_below(Path(file), pattern) for pattern in row.paths)
    inside = inside and row.gpu == bool(ON_GPU.search(name))
    return inside and (not row.words or any(w in name for w in row.words))


def is_below(file: Path, pattern: str) -> bool:
    """Whether a file is one that a pattern finds, whatever folders are in between."""
    folder, _, name = pattern.rpartition("/")
    return file.is_relative_to(folder.removesuffix("/**")) and file.match(name)


def summed(outcomes: Mapping[str, str]) -> dict[str, int]:
    """How many tests there were of each kind."""
    kinds = list(outcomes.values())
    return {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}
