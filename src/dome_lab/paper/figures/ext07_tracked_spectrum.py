"""The eigenvalues Λ that DOME itself tracks, on CIFAR-10 and MNIST after ten epochs.

Beyond fig05 and fig08, which show the exact covariance: this is what the paper plots.
Its Λ are the column norms of Y, averaged over all batches since the beginning, so that
they need not look like the covariance of the moment. The same criteria, as far as the
leading 200 that a row keeps can tell.

Scale cpu: fig05's and fig08's training, on 4,000 images, with a tracker of rank 300
that only watches, 3 seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, above, claim
from dome_lab.paper.figures import fig05_cifar10_spectrum as fig05
from dome_lab.paper.figures import fig08_mnist_spectrum as fig08
from dome_lab.paper.names import subset_name
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, Run
from dome_lab.paper.series import number, select
from dome_lab.paper.spectrum import SEEN, cliff, knee
from dome_lab.paper.statistics import Array

NUM_CLASSES = fig05.NUM_CLASSES
RANK = 300  # beyond what is shown: the last ones of a tracker are the least sure


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: the runs of fig05 and fig08 with a tracker, and how many seeds."""

    cases: tuple[Run, ...] = (fig05.PAPER, fig08.PAPER)
    rank: int = RANK
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        cases=tuple(
            replace(case.SCALES["cpu"].run, num_train=4000) for case in (fig05, fig08)
        ),
        num_seeds=3,
    ),
    "smoke": Config(cases=(fig05.SCALES["smoke"].run,), rank=60, num_seeds=2),
}


def runs(config: Config) -> list[Run]:
    """One run a data set and seed, with a tracker that only watches."""
    return [
        replace(case, rank=config.rank, removes="nothing", seed=seed)
        for case in config.cases
        for seed in range(config.num_seeds)
    ]


def parts(config: Config) -> list[Config]:
    """Every data set for itself."""
    return [replace(config, cases=(case,)) for case in config.cases]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Λ by index, a panel a data set, with marks at C and C²."""
    found = _by_task(rows)
    width = drawing.PAGE if len(found) > 1 else drawing.COLUMN
    figure, (panels,) = drawing.canvas(1, len(found), width, 2.7)
    for axes, (name, mine) in zip(panels, found.items(), strict=True):
        values = np.stack([v for v in mine.values() if len(v)])
        index = np.arange(1, values.shape[1] + 1)
        colour = drawing.COLOURS[FILTERED]
        axes.plot(index, values.T, color=colour, **drawing.SEED)
        axes.plot(index, np.exp(np.log(values).mean(axis=0)), color=colour)
        axes.set_xscale("log")
        axes.set_yscale("log")
        drawing.mark(axes, NUM_CLASSES, "C")
        drawing.mark(axes, NUM_CLASSES**2, "C²")
        drawing.label(axes, "index", "tracked eigenvalue", name)
    num_seeds = len({row["seed"] for row in rows})
    drawing.add_note(
        figure,
        f"Mean of {num_seeds} seeds (geometric); thin: each seed.",
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """A cliff at C, and a knee at C², on each data set."""
    C, claims = NUM_CLASSES, []
    for name, mine in _by_task(rows).items():
        found = list(mine.values())
        claims += [
            claim(
                "ext07",
                f"{name}: C large eigenvalues",
                f"On logarithmic axes Λ falls more steeply across C = {C} than over "
                "the doublings of the index before and after it, by a slope of more "
                f"than {SEEN:g}.",
                [
                    above(
                        "slope beyond its neighbours'",
                        [cliff(v, C) for v in found],
                        SEEN,
                    )
                ],
            ),
            claim(
                "ext07",
                f"{name}: outliers end at C²",
                f"On logarithmic axes Λ falls less steeply behind C² = {C**2} than "
                f"before it, by a slope of more than {SEEN:g}.",
                [above("drop of the slope", [knee(v, C**2) for v in found], SEEN)],
            ),
        ]
    return claims


def _by_task(rows: Sequence[Row]) -> dict[str, dict[int, Array]]:
    """Λ after the last epoch by seed, by data set; empty where a run diverged."""
    found: dict[str, dict[int, Array]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = select(rows, task=task)
        last = max(number(row, "epoch") for row in mine)
        found[subset_name(task, mine[0]["num_classes"])] = {
            int(number(row, "seed")): np.asarray(row["eigenvalues"] or [])
            for row in select(mine, epoch=last)
        }
    return found
