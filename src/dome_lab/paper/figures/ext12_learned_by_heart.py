"""Whether MNIST's spectrum looks otherwise before the samples are learned by heart.

Beyond fig08, whose spectrum after ten epochs has neither a cliff at C nor a flat bulk,
as the paper's has. Nearly all samples are learned by heart then: their gradients are
next to nothing, and the eigenvalues fall ever faster. Here the same training stops
after one epoch. If that is the reason, the bulk is flatter and the cliff higher.

Scale cpu: as fig08, all images, 8 seeds; the runs of ten epochs are fig08's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, above, below, claim
from dome_lab.paper.figures import fig08_mnist_spectrum as fig08
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import distinct, select
from dome_lab.paper.spectrum import (
    cliff,
    draw_spectrum,
    flatness,
    judge_spectrum,
    spectra,
)
from dome_lab.paper.statistics import Array

NUM_CLASSES = fig08.NUM_CLASSES


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: the whole training, after how many epochs it stops, how many seeds."""

    run: Run = fig08.PAPER
    epochs: int = 1
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(run=fig08.SCALES["cpu"].run, num_seeds=fig08.SCALES["cpu"].num_seeds),
    "smoke": Config(run=replace(fig08.SCALES["smoke"].run, epochs=2), num_seeds=2),
}


def runs(config: Config) -> list[Run]:
    """A short and a whole run a seed."""
    return [
        replace(config.run, seed=seed, epochs=epochs)
        for seed in range(config.num_seeds)
        for epochs in (config.epochs, config.run.epochs)
    ]


compute_run = fig08.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Eigenvalues by index, a panel a length of training, with marks at C and C²."""
    found = _by_epochs(rows)
    figure, (panels,) = drawing.canvas(1, len(found), drawing.PAGE, 2.7)
    notes = []
    for axes, (epochs, mine) in zip(panels, found.items(), strict=True):
        under = draw_spectrum(axes, np.stack(list(mine.values())), NUM_CLASSES)
        drawing.label(axes, "index", "eigenvalue of the covariance", _after(epochs))
        notes.append(f"{under:,} {_after(epochs)}")
    num_seeds = len({row["seed"] for row in rows})
    drawing.add_note(
        figure,
        f"Mean of {num_seeds} seeds (geometric); thin: each seed. Eigenvalues below "
        f"the picture: {', '.join(notes)}.",
        drawing.extension_note(rows, varied=["epochs"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """The paper's claims after the short training, and what the whole one changes."""
    found = _by_epochs(rows)
    few, many = min(found), max(found)
    C, short, whole = NUM_CLASSES, found[few], found[many]
    seeds = [seed for seed in short if seed in whole]
    steeper = [flatness(short[s], C) - flatness(whole[s], C) for s in seeds]
    higher = [cliff(short[s], C) - cliff(whole[s], C) for s in seeds]
    return [
        *judge_spectrum("ext12", short, C, f"{_after(few)}: "),
        claim(
            "ext12",
            "the bulk is flatter before",
            "The slope of the bulk against that of the outliers is smaller "
            f"{_after(few)} than {_after(many)}.",
            [below("change of the slope of the bulk", steeper, 0)],
        ),
        claim(
            "ext12",
            "the cliff at C is higher before",
            "The slope across C, beyond its neighbours', is larger "
            f"{_after(few)} than {_after(many)}.",
            [above("change of the slope across C", higher, 0)],
        ),
    ]


def _after(epochs: int) -> str:
    return f"after {epochs} epoch{'s' if epochs > 1 else ''}"


def _by_epochs(rows: Sequence[Row]) -> dict[int, dict[int, Array]]:
    """Spectra by seed, by the length of training, the shorter first."""
    lengths = sorted(int(epochs) for epochs in distinct(rows, "epochs"))
    return {epochs: spectra(select(rows, epochs=epochs)) for epochs in lengths}
