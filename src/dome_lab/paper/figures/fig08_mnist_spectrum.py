"""Spectrum of the centred gradient covariance on MNIST after ten epochs.

Claims: as fig05, which owns the computation.

Scale cpu: as fig05, all 60,000 images, 8 seeds. A run took 10 minutes on one core.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper.claims import Claim
from dome_lab.paper.figures import fig05_cifar10_spectrum as fig05
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Repeated
from dome_lab.paper.spectrum import draw_spectra, judge_spectrum, spectra

PAPER = replace(fig05.PAPER, task="mnist")
NUM_CLASSES = 10

SCALES = {
    "paper": Repeated(run=PAPER),
    "cpu": Repeated(run=replace(PAPER, num_test=500), num_seeds=8),
    "smoke": fig05.SCALES["smoke"],
}
runs, compute_run = fig05.runs, fig05.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Eigenvalues by index, with marks at C and C²."""
    return draw_spectra(rows, PAPER, NUM_CLASSES)


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Leaders, outliers, bulk."""
    return judge_spectrum("fig08", spectra(rows), NUM_CLASSES)
