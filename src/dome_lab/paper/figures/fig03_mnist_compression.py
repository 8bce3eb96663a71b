"""Test accuracy on MNIST by compression rate, Adam with and without the filter.

Claims: similar at low compression; ahead at high compression.

Scale cpu: one epoch of all 60,000 training images, B = 128 as in the paper (469 steps),
2,000 test images, rates none, 10, 100 and 1,000, 3 seeds, which decide every claim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.tolerance import (
    Rates,
    across_rates,
    draw_tolerance,
    judge_tolerance,
)

PAPER = Run(
    task="mnist",
    model="resnet8",
    seed=0,
    batch_size=128,
    epochs=50,
    optimizer="adam",
    lr=1e-3,
    rank=100,
)


# Of figures with many variants on this one's question, at scale cpu: B = 32 makes four
# times the steps in about the same time.
SMALL = replace(PAPER, num_train=2500, num_test=2000, epochs=6, batch_size=32)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: a run of it, the rates, and how many seeds."""

    run: Run = PAPER
    rates: Rates = (None, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(PAPER, num_test=2000, epochs=1),
        rates=(None, 10, 100, 1000),
        num_seeds=3,
    ),
    "smoke": Config(
        run=replace(
            PAPER,
            task="digits",
            num_train=48,
            num_test=50,
            rank=10,
            epochs=1,
            batch_size=16,
        ),
        rates=(None, 10, 100, 1000),
        num_seeds=2,
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Both arms of every rate and seed."""
    return across_rates(config.run, config.rates, config.num_seeds)


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rate."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 3.1)
    draw_tolerance(axes, rows)
    drawing.add_title(figure, rows, axes)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        drawing.scale_note(rows, PAPER),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Similar at low compression, ahead at high."""
    return judge_tolerance("fig03", rows)
