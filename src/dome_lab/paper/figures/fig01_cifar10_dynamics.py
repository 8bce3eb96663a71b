"""Training dynamics on CIFAR-10 with and without the filter.

Claims: filtering does not slow convergence, in training loss or in accuracy; along the
unfiltered run the fraction of the gradients' norm in span(U) follows the training loss
(the paper: Spearman's ρ = 0.98). With momentum as torch sums it, and as the paper's
Algorithm 1 averages it, whose steps are a tenth as long.

Scale cpu: 2,500 training and 2,000 test images, 10 epochs, 8 seeds; all else is the
paper's. An epoch took 8 s on one core without evaluation: 22 core-minutes in
all for each momentum.

Scale full: the paper's run with torch's momentum, 50 epochs, 3 seeds, on 25,000
training images, half of CIFAR-10: the data set at hand has no more. And what the filter
adds in as many seconds. About six hours of one core.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper import train
from dome_lab.paper.claims import Claim
from dome_lab.paper.dynamics import (
    Momenta,
    draw_dynamics,
    judge_dynamics,
    momenta_parts,
    momenta_runs,
)
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run

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


SCALES = {
    "paper": Momenta(run=PAPER),
    "cpu": Momenta(
        run=replace(PAPER, num_train=2500, num_test=2000, epochs=10), num_seeds=8
    ),
    "full": Momenta(
        run=replace(PAPER, num_train=25_000),
        optimizers=("sgd",),
        num_seeds=3,
        paced_epochs=3,
    ),
    "smoke": Momenta(
        run=replace(PAPER, task="digits", num_train=48, num_test=50, rank=10, epochs=2),
        num_seeds=2,
    ),
}


runs, parts = momenta_runs, momenta_parts
compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss, fraction and accuracy by epoch."""
    return draw_dynamics(rows, PAPER, "test_accuracy")


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Convergence, and whether the fraction follows the loss."""
    return judge_dynamics("fig01", rows, "test_accuracy")
