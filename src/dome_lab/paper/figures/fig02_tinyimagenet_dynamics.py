"""Training dynamics on Tiny ImageNet with and without the filter.

Claims: as fig01, with both kinds of momentum (the paper: Spearman's ρ = 0.96).

Scale cpu: ResNet-8, 20 classes of 100 training and 20 test images, k = C = 20, B = 32,
8 epochs, 8 seeds. An epoch took 11 s on one core without evaluation: 48 core-minutes in
all (the stored runs took longer, on a machine that did much else). Not the paper's
ResNet-18: a step of it with the tracker took 2 s at B = 16, which affords some 120
steps a run. Tried on 300 images with one seed and no filter, it was still at chance
after 180 steps, at learning rate 0.1 and at 0.01.
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
    task="tiny_imagenet",
    model="resnet18",
    seed=0,
    batch_size=64,
    epochs=50,
    lr=0.1,
    momentum=0.9,
    rank=200,
)
MAX_JOBS = {"paper": 1}  # 12 GB a run


SCALES = {
    "paper": Momenta(run=PAPER),
    "cpu": Momenta(
        run=replace(
            PAPER,
            model="resnet8",
            num_classes=20,
            num_train=2000,
            num_test=400,
            rank=20,
            batch_size=32,
            epochs=8,
        ),
        num_seeds=8,
    ),
    "smoke": Momenta(
        run=replace(
            PAPER,
            task="digits",
            model="resnet8",
            num_train=32,
            num_test=50,
            rank=10,
            batch_size=16,
            epochs=2,
        ),
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
    return judge_dynamics("fig02", rows, "test_accuracy")
