"""What does a filtered step cost, against a plain one and the paper's recipe?

Variants take turns in one process; ratios are medians over rounds of the ratio within a
round. The measurement of ``update_every=10`` is the average of ten steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dome_lab.bench.paper_recipe import MISSING, quiet_hooks
from dome_lab.bench.questions import portion
from dome_lab.bench.run import TextTable, milliseconds
from dome_lab.bench.timing import (
    SMOKE,
    Config,
    Pace,
    Round,
    Spread,
    Variant,
    clock_of,
    compared,
    measure,
    ratios,
    seconds_of,
    spread,
)
from dome_lab.bench.training import (
    Loop,
    attach_paper_recipe,
    filtered_loop,
    updates_to_settle,
)
from dome_lab.paper.workers import keep_what_steps_free

if TYPE_CHECKING:
    from collections.abc import Callable

    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

PLAIN, OURS, SELDOM = "plain", "ours", "ours, update_every=10"
SVD, PAPER = 'ours, tracker="svd"', "paper's recipe"
FEW, THIN = "ours, rank 10", "ours, rank 10, direction_rank=4"
VARIANTS = (PLAIN, OURS, SELDOM, SVD, FEW, THIN, PAPER)
EVERY = 10
NUM_FEW = 10
# Runs in every round to tell what state the machine was in: shared hardware may slow
# products down without slowing a plain step as much, which no ratio takes out.
PRODUCT = "square product"
# Its size: large enough for all cores, and for all that a GPU has.
PRODUCT_SIZE = {"cpu": 1024, "cuda": 4096}
# Largest ratio to a plain step that is the goal, at two cores and rank 100 or as said.
TARGETS = {
    (OURS, 16): 2.8,
    (OURS, 128): 2.2,
    (SELDOM, 16): 1.5,
    (SELDOM, 128): 1.2,
    (THIN, 16): 1.8,
    (THIN, 128): 1.4,
}
SCALES = {
    "smoke": SMOKE,
    "quick": Config(pace=Pace(seconds=20)),
    "usual": Config(pace=Pace(seconds=120, least=9)),
    "full": Config(
        batch_sizes=(8, 16, 32, 64, 128, 256), pace=Pace(seconds=120, least=9)
    ),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return 5 + len(config.batch_sizes) * config.pace.seconds


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size and variant."""
    rows: list[Row] = []
    keep_what_steps_free()
    for i, batch_size in enumerate(config.batch_sizes):
        told = portion(tell, f"step cost, B = {batch_size}", i, len(config.batch_sizes))
        run, flops = square_product(config.device)
        variants = [*_variants(config, batch_size), Variant(PRODUCT, run)]
        with quiet_hooks():
            rounds = measure(variants, config.pace, told, clock_of(config.device))
        rows += _rows(rounds, batch_size, flops)
    if config.device != "cpu":  # the goals are those of two cores
        rows = [row | {"target": None} for row in rows]
    return rows


def _variants(config: Config, batch_size: int) -> list[Variant]:
    setting, rank, device = config.setting, config.rank, config.device
    updates = updates_to_settle(batch_size, rank)

    def ours(rank: int = rank, **options: object) -> Loop:
        return filtered_loop(setting, batch_size, rank, device, **options)

    few = min(NUM_FEW, rank)

    variants = [
        Variant(PLAIN, Loop(setting, batch_size, device=device).step, num_steps=3),
        Variant(OURS, ours().step, num_steps=4, num_warmup=updates),
        Variant(
            SELDOM,
            ours(update_every=EVERY).step,
            num_steps=EVERY,
            num_warmup=EVERY * updates,
        ),
        Variant(SVD, ours(tracker="svd").step, num_warmup=updates),
        Variant(FEW, ours(few).step, num_steps=4, num_warmup=updates),
        Variant(
            THIN,
            ours(few, direction_rank=4).step,
            num_steps=4,
            num_warmup=updates,
        ),
    ]
    paper = Loop(setting, batch_size, device=device)
    try:
        attach_paper_recipe(paper, rank)
    except ModuleNotFoundError:
        return variants
    return [*variants, Variant(PAPER, paper.step, num_warmup=updates)]


def _rows(rounds: Sequence[Round], batch_size: int, flops: int) -> list[Row]:
    rows: list[Row] = []
    rate = spread([flops / seconds for seconds in seconds_of(rounds, PRODUCT)])
    for name in rounds[0]:
        if name == PRODUCT:
            continue
        row: Row = compared(rounds, name, PLAIN) | {
            "batch_size": batch_size,
            "target": TARGETS.get((name, batch_size)),
            "sgemm": rate.median,
            "sgemm_low": rate.low,
            "sgemm_high": rate.high,
        }
        if PAPER in rounds[0]:
            gain = spread(ratios(rounds, PAPER, name))
            row |= {"gain": gain.median, "gain_low": gain.low, "gain_high": gain.high}
        rows.append(row)
    return rows


def square_product(device: str) -> tuple[Callable[[], object], int]:
    """A large square product to run now and then, and its flops."""
    size = PRODUCT_SIZE.get(torch.device(device).type, PRODUCT_SIZE["cpu"])
    A = torch.ones(size, size, device=device)
    out = torch.empty_like(A)
    return lambda: torch.mm(A, A, out=out), 2 * size**3


def table(rows: list[Row]) -> TextTable:
    """Variants by batch size: time, ratio to plain, and how much the paper's takes."""
    with_paper = any(row["variant"] == PAPER for row in rows)
    notes = [
        "Medians, quartiles in brackets. Ratios are taken within a round.",
        "The last column is the time of the paper's recipe in units of this step.",
    ]
    if not with_paper:
        notes.append(f"{MISSING[0].upper()}{MISSING[1:]}.")
    rates = {row["batch_size"]: _gigaflops(row) for row in rows}
    during = "; ".join(f"{rate} at B = {size}" for size, rate in rates.items())
    notes.append(f"Square float32 products meanwhile, GF/s: {during}.")
    lines = [
        [
            f"{row['batch_size']}",
            row["variant"].removeprefix(f"{OURS}, "),
            milliseconds(row["median"]),
            str(Spread(row["ratio"], row["ratio_low"], row["ratio_high"])),
            "-" if row["target"] is None else f"{row['target']}",
            f"{row['gain']:.1f}" if "gain" in row else "-",
        ]
        for row in rows
    ]
    headings = ("B", "", "step", "/ plain", "goal", "recipe /")
    return TextTable("Time of a training step", headings, lines, notes)


def _gigaflops(row: Row) -> str:
    median, low, high = (row[k] / 1e9 for k in ("sgemm", "sgemm_low", "sgemm_high"))
    return f"{median:.0f} ({low:.0f} - {high:.0f})"
