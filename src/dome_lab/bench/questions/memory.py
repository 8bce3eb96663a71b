"""How much memory does a filtered step take beyond a plain one?

Each case in a process of its own: plain steps, then filtered ones, the peak of memory
read after each: resident memory, or a GPU's. The extra is the difference of the two, to
be held against 1.25 (d k + d B) numbers and against what ``dome.plan`` predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

import dome
from dome.parameters import Layout
from dome.planning.memory import available_memory
from dome.planning.units import size
from dome_lab.bench.memory import (
    TIDY_MALLOC,
    in_fresh_process,
    peak_memory,
    reset_peak,
)
from dome_lab.bench.paper_recipe import MISSING, grad_sample_module
from dome_lab.bench.run import TextTable
from dome_lab.bench.training import (
    Loop,
    attach_paper_recipe,
    filtered_loop,
)

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

OURS, PAPER = "ours", "paper's recipe"
ALLOWED = 1.25  # times (d k + d B) numbers
GIB = 2**30  # what a machine of "16 GB" has sixteen of


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        setting: Name of the network, as in ``dome_lab.bench.training``.
        batch_size: Samples B.
        rank: Directions K, with a layer-wise layout those of each layer.
        method: Ours, or the paper's recipe.
        layout: "global" or "layerwise".
        dtype: Storage of the basis.
        stream: Samples are used and dropped layer by layer.
        num_updates: Filtered steps before the one that is measured.
        limit: Bytes of resident memory all of it has to fit in, if there is a limit.
        seconds: About how long it takes.
    """

    setting: str
    batch_size: int
    rank: int
    method: str = OURS
    layout: str = "global"
    dtype: str = "float32"
    stream: bool = False
    num_updates: int = 12
    limit: int | None = None
    seconds: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the question."""

    cases: Sequence[Case]
    device: str = "cpu"


SMALL = tuple(
    Case(setting="resnet8", batch_size=batch_size, rank=100, method=method)
    for batch_size in (16, 128)
    for method in (OURS, PAPER)
)


def _large(layout: str, dtype: str, rank: int, limit: int) -> Case:
    return Case(
        setting="resnet18",
        batch_size=64,
        rank=rank,
        layout=layout,
        dtype=dtype,
        num_updates=2,
        limit=limit * GIB,
        seconds=200.0,
    )


LARGE = (
    _large("global", "float32", 200, 16),
    _large("global", "bfloat16", 200, 8),
    _large("layerwise", "bfloat16", 200, 8),
    # Every layer has a basis of this rank: 200 in float32 would be as large as global.
    _large("layerwise", "float32", 100, 8),
)

STREAMED = tuple(
    Case(
        setting="resnet18 on 16x16",
        batch_size=32,
        rank=10,
        layout="layerwise",
        stream=stream,
        num_updates=2,
        seconds=15.0,
    )
    for stream in (False, True)
)

SCALES = {
    "smoke": Config(
        cases=(Case(setting="resnet8 on 8x8", batch_size=5, rank=3, num_updates=2),)
    ),
    "quick": Config(cases=SMALL[::2]),
    "usual": Config(cases=SMALL),
    "full": Config(cases=SMALL + STREAMED + LARGE),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return sum(case.seconds for case in config.cases)


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per case; one that cannot run has a reason instead of numbers."""
    rows: list[Row] = []
    whole, done = expected_seconds(config), 0.0
    for case in config.cases:
        tell(f"memory, {_name(asdict(case))}", done / whole)
        reason = _obstacle(case, config.device)
        numbers = {"skipped": reason} if reason else _measured(case, config.device)
        rows.append(asdict(case) | {"device": config.device} | numbers)
        done += case.seconds
    tell("memory", 1.0)
    return rows


def _obstacle(case: Case, device: str) -> str | None:
    if case.method == PAPER:
        try:
            grad_sample_module()
        except ModuleNotFoundError:
            return MISSING
    available = available_memory(torch.device(device))
    if case.limit is not None and available < case.limit:
        return f"{size(case.limit)} needed, {size(available)} available"
    return None


def _measured(case: Case, device: str) -> Row:
    peaks = in_fresh_process(
        __name__,
        "peaks",
        # Where the whole process has a limit, memory is what a user's process takes.
        TIDY_MALLOC if case.limit is None else {},
        device=device,
        **{k: v for k, v in asdict(case).items() if k not in {"limit", "seconds"}},
    )
    model = Loop(case.setting, 1).model
    blocks = [block.dim for block in Layout(model, case.layout).blocks]
    dim, rows = sum(blocks), max(blocks) if case.stream else sum(blocks)
    extra = peaks["filtered"] - peaks["plain"]
    itemsize = getattr(torch, case.dtype).itemsize
    floor = dim * case.rank * itemsize + rows * case.batch_size * 4
    predicted = None
    if case.method == OURS:
        choices = dome.plan(model, case.rank, case.batch_size).choices
        wanted = (case.layout, getattr(torch, case.dtype), case.stream)
        predicted = next(
            c.memory for c in choices if (c.layout, c.basis_dtype, c.stream) == wanted
        )
    return {
        **peaks,
        "dim": dim,
        "extra": extra,
        "floor": floor,
        "allowed": ALLOWED * floor,
        "predicted": predicted,
    }


def peaks(
    setting: str,
    batch_size: int,
    rank: int,
    method: str,
    layout: str,
    dtype: str,
    stream: bool,
    num_updates: int,
    device: str = "cpu",
) -> dict[str, int | bool]:
    """Peaks of memory in this process: plain step, filtered step, all."""
    _load_code(device)
    # No more inputs than are used: they would count as memory that training takes.
    loop = Loop(setting, batch_size, num_updates + 1, device)
    for _ in range(2):  # the first makes what torch keeps for good
        loop.step()
    highest = peak_memory(device)
    is_reset = reset_peak(device)
    loop.step()
    plain = peak_memory(device)
    if method == OURS:
        storage = getattr(torch, dtype)
        options = {"layout": layout, "basis_dtype": storage, "stream": stream}
        dome.attach(loop.model, loop.optimizer, rank, **options)
    else:
        attach_paper_recipe(loop, rank)
    for _ in range(num_updates):
        loop.step()
    highest = max(highest, peak_memory(device))
    reset_peak(device)
    loop.step()
    filtered = peak_memory(device)
    return {
        "plain": plain,
        "filtered": filtered,
        "highest": max(highest, filtered),
        "is_reset": is_reset,
    }


def _load_code(device: str) -> None:
    """Run small filters, so that the machine code of their kernels counts as plain."""
    for batch_size in (4, 8):  # the two ways of an update
        small = filtered_loop("resnet8 on 8x8", batch_size, 2, device)
        for _ in range(3):
            small.step()


def _name(row: Row) -> str:
    method = "" if row["method"] == OURS else f", {row['method']}"
    method += ", streamed" if row["stream"] else ""
    return (
        f"{row['setting']}, {row['layout']} {row['dtype']}, k = {row['rank']}, "
        f"B = {row['batch_size']}{method}"
    )


def table(rows: list[Row]) -> TextTable:
    """Cases: extra against floor and ``plan``, the process against its limit."""
    notes = [f"{_name(row)}: {row['skipped']}." for row in rows if "skipped" in row]
    measured = [row for row in rows if "skipped" not in row]
    if not all(row["is_reset"] for row in measured):
        notes.append("The peak cannot be reset here: the extra includes the start.")
    lines = [
        [
            _name(row),
            size(row["extra"]),
            size(row["floor"]),
            f"{row['extra'] / row['floor']:.2f}",
            f"{ALLOWED}",
            _prediction(row),
            size(row["highest"]),
            "-" if row["limit"] is None else size(row["limit"]),
        ]
        for row in measured
    ]
    headings = (
        "",
        "extra of a step",
        "d k + d B",
        "ratio",
        "at most",
        "plan (off by)",
        "whole process",
        "at most",
    )
    where = "resident memory" if rows[0]["device"] == "cpu" else "memory of the GPU"
    return TextTable(f"Peak {where}", headings, lines, notes)


def _prediction(row: Row) -> str:
    if row["predicted"] is None:
        return "-"
    off = row["predicted"] / row["extra"] - 1 if row["extra"] > 0 else float("nan")
    return f"{size(row['predicted'])} ({off:+.0%})"
