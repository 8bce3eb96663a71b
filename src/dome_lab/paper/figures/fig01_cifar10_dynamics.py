"""Training dynamics on CIFAR-10 with and without the filter.

Claims: filtering does not slow convergence, in training loss or in accuracy; along the
unfiltered run the fraction of the gradients' norm in span(U) follows the training loss
(the paper: Spearman's ρ = 0.98).

Scale cpu: 2,500 training and 2,000 test images, 10 epochs, 3 seeds; all else is the
paper's. An epoch took 8 s on one core without evaluation: 8 core-minutes in all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper.claims import Claim
from dome_lab.paper.dynamics import (
    both_arms,
    draw_dynamics,
    judge_convergence,
    judge_fraction,
)
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run

PAPER = Run(
    task="cifar10",
    model="resnet8",
    seed=0,
    batch_size=16,
    epochs=50,
    lr=0.1,
    momentum=0.9,
    rank=100,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: a run of it, and how many seeds."""

    run: Run = PAPER
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(PAPER, num_train=2500, num_test=2000, epochs=10), num_seeds=3
    ),
    "smoke": Config(
        run=replace(
            PAPER, task="digits", num_train=128, num_test=100, rank=10, epochs=2
        ),
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """Both arms of every seed."""
    return both_arms(config.run, config.num_seeds)


def compute(config: Config) -> Iterator[Row]:
    """Yield a row an epoch, run after run."""
    for run in runs(config):
        yield from compute_run(run)


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss, fraction and accuracy by epoch."""
    return draw_dynamics(rows, PAPER, "test_accuracy")


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Convergence, and what the fraction does."""
    group = {"": list(rows)}
    return [
        *judge_convergence("fig01", group, "test_accuracy"),
        *judge_fraction("fig01", group),
    ]
