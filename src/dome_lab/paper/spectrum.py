"""Spectrum of the centred covariance of per-sample gradients, drawn and judged.

Letters: N samples, D parameters, C classes. The N − 1 eigenvalues of the D x D
covariance that are not zero are those of the N x N Gram matrix, which is formed in
float64.

A spectrum λ₁ ≥ λ₂ ≥ ... is judged by its local slopes, −d log λ / d log i: of a power
law, a spectrum without structure, they are the same everywhere. Each criterion compares
the slope where the paper sees something with those on either side, so that noise alone
passes it less often than one time in twenty (a test draws noisy power laws). What bends
by less than 0.1 has no edge:

- the cliff at C: the slope across C, over a doubling of the index, less the larger one
  of the doublings before and after it.
- the knee at C²: by how much the slope drops, from the doubling before it to that
  behind it; and that less the larger drop at a third and at three times of C².
- the flatness of the bulk, indices 3 C² to N/2: its slope against the mean slope from C
  to C². A power law has 1, a flat bulk 0.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import covariance_eigenvalues
from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, above, below, claim
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN, Run
from dome_lab.paper.statistics import Array, Band, number, student_band
from dome_lab.paper.tasks.selection import some_samples
from dome_lab.paper.train import Keeper, trained_model

SHOWN = 1e-6  # of the first eigenvalue: what lies below is not drawn
NUM_SAMPLES = 2000  # of the training set, or all if there are fewer
NUM_DENSE, NUM_SPARSE = 300, 60  # indices that are kept, see kept_indices
CHUNK = 125  # samples whose gradients are taken at once
BULK_FROM = 3  # times C²
FLAT = 0.5  # slope of the bulk against that of the outliers
# Slopes that differ by less cannot be told apart in a picture: after a doubling of the
# index the eigenvalues are 7 % apart.
SEEN = 0.1
OCTAVE, ASIDE = 2.0, 3.0  # factors of the index, see above


def compute_spectrum(run: Run, keeper: Keeper | None = None) -> Iterator[Row]:
    """Train, then yield rows of an index and the eigenvalue there, largest first."""
    started = time.perf_counter()
    eigenvalues = covariance_eigenvalues(gradients_after(run, keeper=keeper)).tolist()
    kept = kept_indices(len(eigenvalues))
    seconds = (time.perf_counter() - started) / len(kept)
    for index in kept:
        yield Row(
            **run.columns(),
            epoch=run.epochs,
            index=index,
            eigenvalue=eigenvalues[index - 1],
            seconds=seconds,
        )


def gradients_after(
    run: Run, dtype: torch.dtype = torch.float32, keeper: Keeper | None = None
) -> Tensor:
    """Train, then the gradients of some training samples in this precision, (N, D)."""
    model, task = trained_model(run, keeper)
    model.to(dtype)
    device = next(model.parameters()).device
    x, y = some_samples(task, NUM_SAMPLES)
    inputs = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    parts = zip(inputs.split(CHUNK), y.to(device).split(CHUNK), strict=True)
    return torch.cat(
        [dome.per_sample_gradients(model, cross_entropy, *part) for part in parts]
    )


def kept_indices(num: int) -> list[int]:
    """The first few hundred indices, beyond them some that are evenly spaced in log."""
    if num <= NUM_DENSE:
        return list(range(1, num + 1))
    sparse = np.geomspace(NUM_DENSE, num, NUM_SPARSE + 1).round().astype(int)
    return [*range(1, NUM_DENSE), *map(int, np.unique(sparse))]


def draw_spectra(rows: Sequence[Row], paper: Run, num_classes: int) -> Figure:
    """All eigenvalues by index, with marks at C and C²."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 2.7)
    values = np.stack(list(spectra(rows).values()))
    below = draw_spectrum(axes, values, num_classes)
    drawing.label(axes, "index", "eigenvalue of the covariance")
    drawing.add_title(figure, rows)
    drawing.add_note(
        figure,
        f"{values.shape[1] + 1:,} training samples' gradients; geometric mean.",
        f"{below:,} eigenvalues lie below the picture." if below else "",
        drawing.statistics_note(rows),
        drawing.scale_note(rows, paper),
    )
    return figure


def draw_spectrum(
    axes: Axes,
    values: Array,
    num_classes: int,
    colour: str = drawing.COLOURS[PLAIN],
    name: str = "",
) -> int:
    """Spectra (seeds, N) into a panel; how many eigenvalues lie below it."""
    index = np.arange(1, values.shape[1] + 1)
    good = values[np.isfinite(values).all(axis=1)]
    least = SHOWN * good[:, 0].max(initial=0.0)
    if len(good):
        logs = np.log(good.clip(min=least / 1e3))
        axes.plot(index, good.T, color=colour, **drawing.SEED)
        band = student_band(logs)
        shown = Band(*(np.exp(part) for part in (band.mean, band.low, band.high)))
        drawing.draw_line(axes, index, shown, colour, label=name or None)
        axes.set_ylim(least, 3 * good.max())
    axes.set_xlim(0.8, 1.3 * len(index))
    axes.set_xscale("log")
    axes.set_yscale("log")
    drawing.mark(axes, num_classes, "C")
    drawing.mark(axes, num_classes**2, "C²")
    return int((good < least).sum(axis=1).mean()) if len(good) else 0


def spectra(rows: Sequence[Row]) -> dict[int, Array]:
    """The eigenvalues of each seed, largest first, those not kept interpolated."""
    found: dict[int, dict[float, float]] = {}
    for row in sorted(rows, key=lambda row: number(row, "index")):
        mine = found.setdefault(int(number(row, "seed")), {})
        mine[number(row, "index")] = number(row, "eigenvalue")
    return {seed: dense(mine) for seed, mine in found.items()}


def dense(kept: Mapping[float, float]) -> Array:
    """All eigenvalues (N,) of those kept, by their indices."""
    index = np.arange(1, max(kept) + 1)
    return np.interp(np.log(index), np.log(list(kept)), list(kept.values()))


def judge_spectrum(
    figure: str, by_seed: Mapping[int, Array], num_classes: int, which: str = ""
) -> list[Claim]:
    """C large eigenvalues, about C² outliers, a flat bulk.

    Args:
        figure: Its short name.
        by_seed: The eigenvalues of each seed.
        num_classes: C.
        which: Said before the name of each claim, where a figure has several spectra.
    """
    C, found = num_classes, list(by_seed.values())
    shares = ", ".join(
        f"{_share(found, num):.0%} in the first {num}" for num in (C, C**2)
    )
    return [
        claim(
            figure,
            f"{which}C large eigenvalues",
            f"On logarithmic axes the spectrum falls more steeply across C = {C} than "
            "over the doublings of the index before and after it, by a slope of more "
            f"than {SEEN:g}.",
            [above("slope beyond its neighbours'", [cliff(v, C) for v in found], SEEN)],
            f"Of the variance there is {shares}.",
        ),
        claim(
            figure,
            f"{which}about C² outliers",
            f"On logarithmic axes the spectrum falls less steeply behind C² = {C**2} "
            f"than before it, by a slope of more than {SEEN:g}, and bends there more "
            "than at a third and at three times of it.",
            [
                above("drop of the slope", [knee(v, C**2) for v in found], SEEN),
                above("beyond its neighbours'", [sharpness(v, C) for v in found], 0),
            ],
        ),
        claim(
            figure,
            f"{which}flat bulk",
            f"On logarithmic axes the bulk falls less than {FLAT:g} times as steeply "
            "as the outliers between C and C².",
            [
                below(
                    "slope of the bulk against the outliers'",
                    [flatness(v, C) for v in found],
                    FLAT,
                )
            ],
            "A power law, which has no bulk, has 1.",
        ),
    ]


def slope(eigenvalues: Array, start: float, stop: float) -> float:
    """Mean local slope of eigenvalues (N,) between two indices; NaN if one is not."""
    first, last = round(start), round(stop)
    if first < 1 or last > len(eigenvalues) or eigenvalues[last - 1] <= 0:
        return math.nan
    fall = math.log(eigenvalues[first - 1] / eigenvalues[last - 1])
    return fall / math.log(last / first)


def cliff(eigenvalues: Array, num_classes: int) -> float:
    """By how much the slope across C is beyond those before and after it."""
    start, stop = num_classes / math.sqrt(OCTAVE), num_classes * math.sqrt(OCTAVE)
    before = slope(eigenvalues, start / OCTAVE, start)
    after = slope(eigenvalues, stop, stop * OCTAVE)
    return slope(eigenvalues, start, stop) - float(np.maximum(before, after))


def knee(eigenvalues: Array, index: float) -> float:
    """By how much the slope behind an index is less than that before it."""
    before = slope(eigenvalues, index / OCTAVE, index)
    return before - slope(eigenvalues, index, index * OCTAVE)


def sharpness(eigenvalues: Array, num_classes: int) -> float:
    """By how much the knee at C² is beyond those on either side of it."""
    middle = num_classes**2
    aside = knee(eigenvalues, middle / ASIDE), knee(eigenvalues, middle * ASIDE)
    return knee(eigenvalues, middle) - float(np.maximum(*aside))


def flatness(eigenvalues: Array, num_classes: int) -> float:
    """Slope of the bulk against the slope from C to C²; NaN if it is too short."""
    line, C = _bulk(eigenvalues, num_classes), num_classes
    if line is None:
        return math.nan
    slope = np.log(eigenvalues[C**2 - 1] / eigenvalues[C - 1]) / math.log(C)
    return float(line[0] / slope)


def _bulk(eigenvalues: Array, num_classes: int) -> Array | None:
    """The line log λ = a log i + b of the bulk, as (a, b)."""
    start, stop = int(BULK_FROM * num_classes**2), (len(eigenvalues) + 1) // 2
    if stop < 2 * start or eigenvalues[stop - 1] <= 0:
        return None
    index = np.arange(start, stop + 1)
    # Weights 1/i: every stretch of the logarithmic axis counts the same.
    line = np.polyfit(np.log(index), np.log(eigenvalues[index - 1]), 1, w=index**-0.5)
    return np.asarray(line)


def _share(found: Sequence[Array], num: int) -> float:
    """How much of the variance the first eigenvalues hold, on average over seeds."""
    return float(np.mean([values[:num].sum() / values.sum() for values in found]))
