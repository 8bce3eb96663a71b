"""What do the diagnostics cost, as a share of a filtered step?

Those that are meant for every step follow a step that has just been taken, so that
nothing they need has been computed before. ``Drift`` compares bases on one step in
many, and its cost is spread over them; what is on demand is measured once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import dome
from dome.diagnostics import (
    Drift,
    batch_spectrum,
    signal_to_noise,
    suggest_rank,
)
from dome_lab.bench.by_batch_size import SMOKE, Config
from dome_lab.bench.questions import portion
from dome_lab.bench.tables import TextTable, milliseconds, percent
from dome_lab.bench.timing import (
    Pace,
    Variant,
    clock_of,
    measure,
    ratios,
    seconds_of,
    spread,
)
from dome_lab.bench.training import Loop, random_samples, updates_to_settle

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.results import Row

STEP, STATS = "filtered step", ".stats"
CSV, JSONL, BOARD = "Recorder, CSV", "Recorder, JSONL", "Recorder, TensorBoard"
DRIFT_EVERY = 100
DRIFT = f"Drift(every={DRIFT_EVERY})"
SUGGESTION = "suggest_rank of K eigenvalues"
SIGNAL, SPECTRUM = "signal_to_noise of a batch", "batch_spectrum of a batch"
TARGET = 0.02
EVERY_STEP = {STATS, CSV, JSONL, BOARD, DRIFT, SUGGESTION}


SCALES = {
    "smoke": SMOKE,
    "quick": Config(batch_sizes=(16,), pace=Pace(seconds=12)),
    "usual": Config(pace=Pace(seconds=20)),
    "full": Config(pace=Pace(seconds=60)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return config.expected_seconds(beside=3)


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size and quantity."""
    rows: list[Row] = []
    for i, batch_size in enumerate(config.batch_sizes):
        what = f"diagnostics, B = {batch_size}"
        told = portion(tell, what, i, len(config.batch_sizes))
        with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
            variants = _variants(config, batch_size, Path(folder), files)
            rounds = measure(variants, config.pace, told, clock_of(config.device))
        for name in (v.name for v in variants if v.name != STEP):
            spent = DRIFT_EVERY if name == DRIFT else 1
            share = spread([ratio / spent for ratio in ratios(rounds, name, STEP)])
            seconds = [s / spent for s in seconds_of(rounds, name)]
            rows.append(
                {
                    "batch_size": batch_size,
                    "quantity": name,
                    "num_rounds": len(rounds),
                    "median": spread(seconds).median,
                    "share": share.median,
                    "share_low": share.low,
                    "share_high": share.high,
                    "target": TARGET if name in EVERY_STEP else None,
                    "seconds": seconds,
                }
            )
    return rows


def _variants(
    config: Config, batch_size: int, folder: Path, files: ExitStack
) -> list[Variant]:
    loop = Loop(config.setting, batch_size, device=config.device)
    grad_filter = dome.attach(loop.model, loop.optimizer, config.rank)
    for _ in range(updates_to_settle(batch_size, config.rank)):
        loop.step()
    drift = Drift(every=1)
    drift.observe(grad_filter.trackers)
    samples = random_samples(loop.dim, config.rank, batch_size, config.device)[0]

    def after_a_step(name: str, run: Callable[[], object]) -> Variant:
        # Nothing may come between the step and what is asked of it.
        return Variant(name, run, num_settle=0, num_warmup=0)

    def recorded(path: Path) -> Callable[[], object]:
        recorder = files.enter_context(dome.Recorder(path))
        return lambda: recorder.record(grad_filter, loss=0.5)

    def compared() -> object:
        return drift.observe(grad_filter.trackers)

    recorders = {CSV: folder / "run.csv", JSONL: folder / "run.jsonl"}
    variants = [
        after_a_step(STEP, loop.step),
        after_a_step(STATS, lambda: grad_filter.stats),
        *(after_a_step(name, recorded(path)) for name, path in recorders.items()),
        after_a_step(SUGGESTION, lambda: suggest_rank(_spectrum(config.rank), 10)),
        after_a_step(DRIFT, compared),
        after_a_step(SIGNAL, lambda: signal_to_noise(samples)),
        after_a_step(SPECTRUM, lambda: batch_spectrum(samples)),
    ]
    try:
        board = recorded(folder / "board")
    except ModuleNotFoundError:
        return variants
    return [*variants, after_a_step(BOARD, board)]


def _spectrum(rank: int) -> torch.Tensor:
    return torch.arange(1, rank + 2, dtype=torch.float64).reciprocal()


def table(rows: list[Row]) -> TextTable:
    """Quantities: time and share of a step."""
    lines = [
        [
            f"B = {row['batch_size']}: {row['quantity']}",
            milliseconds(row["median"]),
            f"{percent(row['share'])} "
            f"({percent(row['share_low'])} - {percent(row['share_high'])})",
            "on demand" if row["target"] is None else percent(row["target"]),
        ]
        for row in rows
    ]
    return TextTable(
        "Cost of the diagnostics",
        ("", "time", "share of a filtered step", "at most"),
        lines,
        [
            "Medians, quartiles in brackets. Shares are taken within a round. A "
            "Recorder writes what .stats has computed before, so that the two add up."
        ],
    )
