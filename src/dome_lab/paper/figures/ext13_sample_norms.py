"""Whether the spread of the samples' norms hides the spectrum that the paper sees.

Beyond fig05 and fig08, whose spectra fall ever faster: some samples have gradients more
than a thousand times as long as others, so that the first directions are theirs. Here
the same gradients are scaled to norm 1 each. If their norms are the reason, the cliff
at C is higher then and the bulk flatter.

And whether the axes are: with the index on a linear one a power law looks as if it had
a flat bulk. The paper does not say what its axes are.

Scale cpu: fig05's and fig08's training, 3 and 5 seeds. Gradients are taken in float64:
of a sample that is learned well, p − 1 has no digits left in float32.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import normalize

from dome.diagnostics import covariance_eigenvalues
from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, above, below, claim
from dome_lab.paper.figures import fig05_cifar10_spectrum as fig05
from dome_lab.paper.figures import fig08_mnist_spectrum as fig08
from dome_lab.paper.names import subset_name
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import number, select
from dome_lab.paper.spectrum import (
    BULK_FROM,
    FLAT,
    cliff,
    dense,
    draw_spectrum,
    flatness,
    gradients_after,
    judge_spectrum,
    kept_indices,
)
from dome_lab.paper.statistics import Array

NUM_CLASSES = fig05.NUM_CLASSES
GIVEN, UNIT = "as they are", "all 1"  # the samples' norms
LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: fig05's and fig08's runs, and how many seeds of each."""

    cases: tuple[Run, ...] = (fig05.PAPER, fig08.PAPER)
    num_seeds: tuple[int, ...] = (5, 5)


SCALES = {
    "paper": Config(),
    "cpu": Config(
        cases=(fig05.SCALES["cpu"].run, fig08.SCALES["cpu"].run), num_seeds=(3, 5)
    ),
    "smoke": Config(cases=(fig05.SCALES["smoke"].run,), num_seeds=(2,)),
}


def runs(config: Config) -> list[Run]:
    """One unfiltered run a data set and seed."""
    return [
        replace(case, seed=seed)
        for case, num in zip(config.cases, config.num_seeds, strict=True)
        for seed in range(num)
    ]


def parts(config: Config) -> list[Config]:
    """Every data set for itself."""
    return [
        replace(config, cases=(case,), num_seeds=(num,))
        for case, num in zip(config.cases, config.num_seeds, strict=True)
    ]


def compute_run(run: Run) -> Iterator[Row]:
    """Train, then yield the spectrum with the samples' norms and without."""
    started = time.perf_counter()
    grads = gradients_after(run, torch.float64)
    norms = grads.norm(dim=1)
    found = {
        GIVEN: covariance_eigenvalues(grads),
        # A gradient that is 0 in float64, too, has no direction and stays 0.
        UNIT: covariance_eigenvalues(normalize(grads, eps=LEAST, out=grads)),
    }
    seconds = (time.perf_counter() - started) / len(found)
    for name, eigenvalues in found.items():
        yield Row(
            **run.columns(),
            epoch=run.epochs,
            norms=name,
            norm_quantiles=norms.quantile(norms.new_tensor([0.1, 0.5, 0.9])).tolist(),
            num_eigenvalues=len(eigenvalues),
            eigenvalues=[
                eigenvalues[i - 1].item() for i in kept_indices(len(eigenvalues))
            ],
            seconds=seconds,
        )


def draw(rows: Sequence[Row]) -> Figure:
    """Eigenvalues against the first, a panel a data set and kind of axis."""
    found = _by_task(rows)
    figure, grid = drawing.canvas(len(found), 2, drawing.PAGE, 2.5 * len(found))
    for line, (name, mine) in zip(grid, found.items(), strict=True):
        for axes, scale in zip(line, ("log", "linear"), strict=True):
            for colour, (norms, by_seed) in zip(
                drawing.PALETTE[1::-1], mine.items(), strict=False
            ):
                values = np.stack([v / v[0] for v in by_seed.values()])
                draw_spectrum(axes, values, NUM_CLASSES, colour, f"norms {norms}")
            axes.set_xscale(scale)
            if scale == "linear":
                axes.set_xlim(0, values.shape[1])
            drawing.label(axes, "index", "eigenvalue against the first", name)
        line[0].legend(loc="lower left", fontsize=drawing.NOTE)
    num_seeds = [len(mine[GIVEN]) for mine in found.values()]
    drawing.add_note(
        figure,
        "The same spectra with a logarithmic (left) and a linear index (right). "
        f"Mean of {' and '.join(map(str, num_seeds))} seeds (geometric); thin: each "
        "seed.",
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """The paper's claims without the norms, what these change, and what axes do."""
    C, claims = NUM_CLASSES, []
    for name, mine in _by_task(rows).items():
        given, unit = mine[GIVEN], mine[UNIT]
        higher = [cliff(unit[s], C) - cliff(given[s], C) for s in given]
        flatter = [flatness(unit[s], C) - flatness(given[s], C) for s in given]
        claims += [
            *judge_spectrum("ext13", unit, C, f"{name}, norms {UNIT}: "),
            claim(
                "ext13",
                f"{name}: norms hide the cliff at C",
                "The slope across C, beyond its neighbours', is larger when all "
                "samples' gradients are scaled to one norm.",
                [above("change of the slope across C", higher, 0)],
            ),
            claim(
                "ext13",
                f"{name}: norms make the bulk steeper",
                "The slope of the bulk against that of the outliers is smaller when "
                "all samples' gradients are scaled to one norm.",
                [below("change of the slope of the bulk", flatter, 0)],
            ),
            claim(
                "ext13",
                f"{name}: flat on a linear axis",
                "With the index on a linear axis the bulk falls less than "
                f"{FLAT:g} times as steeply as the outliers, norms as they are.",
                [
                    below(
                        "slope of the bulk against the outliers'",
                        [flatness_by_index(v, C) for v in given.values()],
                        FLAT,
                    )
                ],
                _of_a_power_law(given),
            ),
        ]
    return claims


def flatness_by_index(eigenvalues: Array, num_classes: int) -> float:
    """The fall of log λ an index in the bulk against that from C to C²."""
    start, stop = BULK_FROM * num_classes**2, (len(eigenvalues) + 1) // 2
    if stop < 2 * start or eigenvalues[stop - 1] <= 0:
        return math.nan

    def fall(first: int, last: int) -> float:
        ratio = eigenvalues[first - 1] / eigenvalues[last - 1]
        return math.log(ratio) / (last - first)

    return fall(start, stop) / fall(num_classes, num_classes**2)


def _of_a_power_law(by_seed: dict[int, Array]) -> str:
    """What a power law of as many eigenvalues has; of any exponent the same."""
    num = len(next(iter(by_seed.values())))
    law = flatness_by_index(1.0 / np.arange(1, num + 1), NUM_CLASSES)
    return "" if math.isnan(law) else f"A power law, which has no bulk, has {law:.2g}."


def _by_task(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, Array]]]:
    """Spectra by seed, by the samples' norms, by data set."""
    found: dict[str, dict[str, dict[int, Array]]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = select(rows, task=task)
        name = subset_name(task, mine[0]["num_classes"])
        found[name] = {
            norms: {
                int(number(row, "seed")): _spectrum(row)
                for row in select(mine, norms=norms)
            }
            for norms in (GIVEN, UNIT)
        }
    return found


def _spectrum(row: Row) -> Array:
    """All eigenvalues of a row; NaN if its run diverged."""
    num, kept = int(number(row, "num_eigenvalues")), row["eigenvalues"]
    if not isinstance(kept, list):
        return np.full(num, math.nan)
    return dense(dict(zip(kept_indices(num), kept, strict=True)))
