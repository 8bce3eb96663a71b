"""Spectrum of the centred gradient covariance on CIFAR-10 after ten epochs.

Claims: about C very large eigenvalues, about C² outliers, then a relatively flat bulk.
What is read off the spectrum is defined in ``dome_lab.paper.spectrum``. The paper does
not name the optimizer; fig01's is taken.

Scale cpu: the paper's training on 25,000 images, half of the data set: all that were at
hand; gradients of 2,000 of them, 3 seeds.
A run took 7 minutes on one core.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper.claims import Claim
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Repeated, Run
from dome_lab.paper.spectrum import (
    compute_spectrum,
    draw_spectra,
    judge_spectrum,
    spectra,
)

PAPER = Run(
    task="cifar10",
    model="resnet8",
    seed=0,
    batch_size=128,
    epochs=10,
    lr=0.1,
    momentum=0.9,
)
NUM_CLASSES = 10


SCALES = {
    "paper": Repeated(run=PAPER),
    "cpu": Repeated(run=replace(PAPER, num_test=500), num_seeds=3),
    "smoke": Repeated(
        run=replace(PAPER, task="digits", num_train=150, num_test=100, epochs=1),
        num_seeds=2,
    ),
}


def runs(config: Repeated) -> list[Run]:
    """One unfiltered run a seed."""
    return [replace(config.run, seed=seed) for seed in range(config.num_seeds)]


compute_run = compute_spectrum


def draw(rows: Sequence[Row]) -> Figure:
    """Eigenvalues by index, with marks at C and C²."""
    return draw_spectra(rows, PAPER, NUM_CLASSES)


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Leaders, outliers, bulk."""
    return judge_spectrum("fig05", spectra(rows), NUM_CLASSES)
