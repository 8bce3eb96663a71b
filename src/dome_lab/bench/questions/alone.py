"""What does a step take in a process of its own, with the filter and without?

As people train: one loop, nothing else in the process, and glibc as it is. In step_cost
all variants share a process and a heap that keeps what is freed. Processes take turns;
ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dome_lab.bench.memory import in_fresh_process
from dome_lab.bench.questions.step_cost import (
    EVERY,
    FEW,
    NUM_FEW,
    OURS,
    PLAIN,
    SELDOM,
    TARGETS,
    THIN,
)
from dome_lab.bench.run import TextTable, milliseconds
from dome_lab.bench.timing import Round, Spread, compared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

# Options of each; a rank of None is no filter.
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"rank": None},
    OURS: {"rank": 100},
    SELDOM: {"rank": 100, "update_every": EVERY},
    FEW: {"rank": NUM_FEW},
    THIN: {"rank": NUM_FEW, "direction_rank": 4},
}
SECONDS = 8.0  # a process, with importing torch, on average of both batch sizes


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the question."""

    setting: str = "resnet8"
    batch_sizes: tuple[int, ...] = (16, 128)
    variants: tuple[str, ...] = tuple(VARIANTS)
    num_rounds: int = 5
    num_samples: int = 2048  # that are timed, after half as many that are not


SCALES = {
    "smoke": Config(
        setting="resnet8 on 8x8",
        batch_sizes=(6,),
        variants=(PLAIN, THIN),
        num_rounds=1,
        num_samples=60,
    ),
    "quick": Config(variants=(PLAIN, OURS, THIN), num_rounds=3),
    "usual": Config(),
    "full": Config(num_rounds=11),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    processes = len(config.batch_sizes) * len(config.variants) * config.num_rounds
    return SECONDS * processes


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size and variant."""
    rows: list[Row] = []
    done, total = 0, len(config.batch_sizes) * config.num_rounds * len(config.variants)
    for batch_size in config.batch_sizes:
        rounds: list[Round] = []
        for _ in range(config.num_rounds):
            rounds.append({})
            for name in config.variants:
                rounds[-1][name] = in_fresh_process(
                    __name__,
                    step_seconds.__name__,
                    {},
                    setting=config.setting,
                    batch_size=batch_size,
                    num_samples=config.num_samples,
                    options=VARIANTS[name],
                )
                done += 1
                tell(f"alone, B = {batch_size}", done / total)
        rows += [
            compared(rounds, name, PLAIN)
            | {"batch_size": batch_size, "target": TARGETS.get((name, batch_size))}
            for name in config.variants
        ]
    return rows


def step_seconds(
    setting: str, batch_size: int, num_samples: int, options: Mapping[str, Any]
) -> float:
    """Median seconds of a step of a loop that is all this process does."""
    from dome_lab.bench.training import Loop, filtered_loop

    rank, others = options["rank"], {k: v for k, v in options.items() if k != "rank"}
    if rank is None:
        loop = Loop(setting, batch_size)
    else:
        loop = filtered_loop(setting, batch_size, rank, **others)
    every = options.get("update_every") or 1
    num_turns = max(num_samples // batch_size // every, 3)
    seconds = []
    for _ in range(num_turns + num_turns // 2):
        start = time.perf_counter()
        for _ in range(every):
            loop.step()
        seconds.append((time.perf_counter() - start) / every)
    return statistics.median(seconds[num_turns // 2 :])


def table(rows: list[Row]) -> TextTable:
    """Variants by batch size: time and ratio to plain."""
    lines = [
        [
            f"B = {row['batch_size']}: {row['variant']}",
            f"{milliseconds(row['median'])} "
            f"({row['low'] * 1e3:.3g} - {row['high'] * 1e3:.3g})",
            str(Spread(row["ratio"], row["ratio_low"], row["ratio_high"])),
            "-" if row["target"] is None else f"{row['target']}",
        ]
        for row in rows
    ]
    headings = ("", "step", "step / plain", "at most")
    return TextTable(
        "Time of a training step, each loop in a process of its own",
        headings,
        lines,
        ["Medians, quartiles in brackets. Ratios are taken within a round."],
    )
