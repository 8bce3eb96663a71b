"""What does each compressor cost, as a share of a filtered step?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dome.bench.questions import portion
from dome.bench.tables import TextTable, milliseconds, percent
from dome.bench.timing import Pace, Variant, measure, ratios, seconds_of, spread
from dome.bench.training import filtered_loop, updates_to_settle
from dome.compression import GaussianSketch

if TYPE_CHECKING:
    from dome.bench.questions import Tell
    from dome.bench.results import Row

STEP = "filtered step"
RATES = (1, 10, 100, 1000, None)  # None sends one number, rate d
TARGET = 0.05
# A compressor is made from its rate; a new one is a line here.
COMPRESSORS: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "GaussianSketch": GaussianSketch
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the question; ``pace`` is that of one batch size."""

    setting: str = "resnet8"
    rank: int = 100
    batch_sizes: Sequence[int] = (16, 128)
    pace: Pace = field(default_factory=lambda: Pace(seconds=15))


SCALES = {
    "smoke": Config(
        setting="resnet8 on 8x8",
        rank=3,
        batch_sizes=(5,),
        pace=Pace(seconds=0, least=2),
    ),
    "quick": Config(batch_sizes=(16,), pace=Pace(seconds=8)),
    "usual": Config(),
    "full": Config(pace=Pace(seconds=60)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return len(config.batch_sizes) * config.pace.seconds


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size, compressor and rate."""
    rows: list[Row] = []
    for i, batch_size in enumerate(config.batch_sizes):
        told = portion(
            tell, f"compressors, B = {batch_size}", i, len(config.batch_sizes)
        )
        loop = filtered_loop(config.setting, batch_size, config.rank)
        gradient = torch.randn(loop.dim, generator=torch.Generator().manual_seed(0))
        warmup = updates_to_settle(batch_size, config.rank)
        step = Variant(STEP, loop.step, num_steps=2, num_warmup=warmup)
        labels = {_label(k, r): (k, r) for k in COMPRESSORS for r in RATES}
        rounds = measure(
            [step, *(_variant(name, *of, gradient) for name, of in labels.items())],
            config.pace,
            told,
        )
        for label, (kind, rate) in labels.items():
            share = spread(ratios(rounds, label, STEP))
            rows.append(
                {
                    "batch_size": batch_size,
                    "compressor": kind,
                    "rate": loop.dim if rate is None else rate,
                    "num_rounds": len(rounds),
                    "median": spread(seconds_of(rounds, label)).median,
                    "share": share.median,
                    "share_low": share.low,
                    "share_high": share.high,
                    "target": TARGET,
                    "seconds": seconds_of(rounds, label),
                }
            )
    return rows


def _label(kind: str, rate: float | None) -> str:
    return f"{kind}, rate {'d' if rate is None else rate}"


def _variant(name: str, kind: str, rate: float | None, gradient: Tensor) -> Variant:
    compress = COMPRESSORS[kind](len(gradient) if rate is None else rate)
    return Variant(name, lambda: compress(gradient), num_steps=3)


def table(rows: list[Row]) -> TextTable:
    """Compressors by rate: time, and share of a step."""
    lines = [
        [
            f"B = {row['batch_size']}: {row['compressor']}, rate {row['rate']:,}",
            milliseconds(row["median"]),
            f"{percent(row['share'])} "
            f"({percent(row['share_low'])} - {percent(row['share_high'])})",
            percent(row["target"]),
        ]
        for row in rows
    ]
    return TextTable(
        "Cost of compressing and recovering a gradient",
        ("", "time", "share of a filtered step", "at most"),
        lines,
        ["Medians, quartiles in brackets. Shares are taken within a round."],
    )
