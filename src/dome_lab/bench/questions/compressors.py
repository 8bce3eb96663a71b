"""What does each compressor cost, as a share of a filtered step?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dome.compression import (
    QSGD,
    Compressor,
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from dome_lab.bench.questions import portion
from dome_lab.bench.run import TextTable, milliseconds, percent
from dome_lab.bench.timing import (
    SMOKE,
    Config,
    Pace,
    Variant,
    clock_of,
    measure,
    ratios,
    seconds_of,
    spread,
)
from dome_lab.bench.training import filtered_loop, updates_to_settle

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

STEP = "filtered step"
MESSAGES = ", messages"  # encode and decode, where calling is a simulation
TARGET = 0.05
FLOAT32_BITS = 32

Shapes = Sequence[torch.Size]


def _dim(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes)


# A compressor is made from the parameters' shapes; a new one is a line here.
COMPRESSORS: dict[str, Callable[[Shapes], Compressor]] = {
    "GaussianSketch, rate 1": lambda _: GaussianSketch(1),
    "GaussianSketch, rate 10": lambda _: GaussianSketch(10),
    "GaussianSketch, rate 100": lambda _: GaussianSketch(100),
    "GaussianSketch, rate 1000": lambda _: GaussianSketch(1000),
    "GaussianSketch, rate d": lambda shapes: GaussianSketch(_dim(shapes)),
    f"GaussianSketch, rate 1000{MESSAGES}": lambda _: GaussianSketch(1000),
    "HadamardSketch, rate 10": lambda _: HadamardSketch(10),
    "HadamardSketch, rate 1000": lambda _: HadamardSketch(1000),
    "RandomK, rate 10": lambda _: RandomK(10),
    "RandomK, rate 1000": lambda _: RandomK(1000),
    "TopK, rate 10": lambda _: TopK(10),
    "TopK, rate 1000": lambda _: TopK(1000),
    "SignSGD": lambda _: SignSGD(),
    "TernGrad": lambda _: TernGrad(),
    "QSGD, 7 levels": lambda _: QSGD(7),
    "QSGD, 127 levels": lambda _: QSGD(127),
    "PowerSGD, rank 1": lambda shapes: PowerSGD(shapes, 1),
    "PowerSGD, rank 4": lambda shapes: PowerSGD(shapes, 4),
    "ErrorFeedback, TopK, rate 1000": lambda _: ErrorFeedback(TopK(1000)),
}


SCALES = {
    "smoke": SMOKE,
    "quick": Config(batch_sizes=(16,), pace=Pace(seconds=8)),
    "usual": Config(pace=Pace(seconds=15)),
    "full": Config(pace=Pace(seconds=60)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return config.expected_seconds()


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size and compressor."""
    rows: list[Row] = []
    for i, batch_size in enumerate(config.batch_sizes):
        told = portion(
            tell, f"compressors, B = {batch_size}", i, len(config.batch_sizes)
        )
        loop = filtered_loop(config.setting, batch_size, config.rank, config.device)
        random = torch.Generator().manual_seed(0)
        gradient = torch.randn(loop.dim, generator=random).to(config.device)
        warmup = updates_to_settle(batch_size, config.rank)
        step = Variant(STEP, loop.step, num_steps=2, num_warmup=warmup)
        shapes = [p.shape for p in loop.model.parameters()]
        made = {name: make(shapes) for name, make in COMPRESSORS.items()}
        variants = [_variant(name, made[name], gradient) for name in made]
        clock = clock_of(config.device)
        rounds = measure([step, *variants], config.pace, told, clock)
        for name, compressor in made.items():
            share = spread(ratios(rounds, name, STEP))
            num_bits = compressor.num_bits(loop.dim)
            rows.append(
                {
                    "batch_size": batch_size,
                    "compressor": name,
                    "num_bits": num_bits,
                    "reduction": FLOAT32_BITS * loop.dim / num_bits,
                    "num_rounds": len(rounds),
                    "median": spread(seconds_of(rounds, name)).median,
                    "share": share.median,
                    "share_low": share.low,
                    "share_high": share.high,
                    "target": TARGET,
                    "seconds": seconds_of(rounds, name),
                }
            )
    return rows


def _variant(name: str, compressor: Compressor, gradient: Tensor) -> Variant:
    def send() -> Tensor:
        return compressor.decode(compressor.encode(gradient))

    def call() -> Tensor:
        return compressor(gradient)

    return Variant(name, send if name.endswith(MESSAGES) else call, num_steps=3)


def table(rows: list[Row]) -> TextTable:
    """Compressors: size of a message, time, and share of a step."""
    lines = [
        [
            f"B = {row['batch_size']}: {row['compressor']}",
            f"{row['reduction']:.3g}x",
            milliseconds(row["median"]),
            f"{percent(row['share'])} "
            f"({percent(row['share_low'])} - {percent(row['share_high'])})",
            percent(row["target"]),
        ]
        for row in rows
    ]
    return TextTable(
        "Cost of compressing and recovering a gradient",
        ("", "smaller", "time", "share of a filtered step", "at most"),
        lines,
        [
            "Medians, quartiles in brackets. Shares are taken within a round. "
            '"Smaller" is float32 over all that travels.'
        ],
    )
