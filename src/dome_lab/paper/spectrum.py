"""Spectrum of the centred covariance of per-sample gradients, drawn and judged.

Letters: N samples, D parameters, C classes. The N − 1 eigenvalues of the D x D
covariance that are not zero are those of the N x N Gram matrix, which is formed in
float64.

Three numbers are read off a spectrum λ₁ ≥ λ₂ ≥ ..., all in logarithms of both λ and its
index, in which a spectrum without structure, a power law, is a straight line:

- the leaders: the index at which λ falls fastest over a doubling of the index, looked
  for between 2 and C^1.5. A spectrum that falls ever more slowly has 2.
- the outliers: how many λ are more than twice what a line fitted to the bulk, indices
  3 C² to N/2, predicts for their index. A power law has none.
- the flatness of the bulk: the slope of that line against the mean slope from C to C².
  A power law has 1, a flat bulk 0.
"""

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import covariance_eigenvalues
from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, Finding, below, between, claim
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN, Run
from dome_lab.paper.series import number
from dome_lab.paper.statistics import Array, bootstrap_band
from dome_lab.paper.tasks.selection import some_samples
from dome_lab.paper.train import trained_model

CONFIDENCE = 0.95
NUM_SAMPLES = 2000  # of the training set, or all if there are fewer
NUM_DENSE, NUM_SPARSE = 300, 60  # indices that are kept, see kept_indices
CHUNK = 125  # samples whose gradients are taken at once
BULK_FROM = 3  # times C²
OUTLIER = 2.0  # times the bulk's line
FLAT = 0.5  # slope of the bulk against that of the outliers
SAME_COUNT, SAME_ORDER = 2.0, 3.0  # factors within which a count is "C", "about C²"


def compute_spectrum(run: Run) -> Iterator[Row]:
    """Train, then yield rows of an index and the eigenvalue there, largest first."""
    started = time.perf_counter()
    model, task = trained_model(run)
    device = next(model.parameters()).device
    x, y = some_samples(task, NUM_SAMPLES)
    x, y = x.to(device).split(CHUNK), y.to(device).split(CHUNK)
    grads = torch.cat(
        [
            dome.per_sample_gradients(model, cross_entropy, *part)
            for part in zip(x, y, strict=True)
        ]
    )
    eigenvalues = covariance_eigenvalues(grads).tolist()
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
    index = np.arange(1, values.shape[1] + 1)
    band = bootstrap_band(values[np.isfinite(values).all(axis=1)], CONFIDENCE)
    drawing.draw_band(axes, index, band, PLAIN, linestyle="-")
    axes.set_xlim(0.8, 1.3 * len(index))
    axes.set_xscale("log")
    axes.set_yscale("log")
    drawing.mark(axes, num_classes, "C")
    drawing.mark(axes, num_classes**2, "C²")
    drawing.label(axes, "index", "eigenvalue of the covariance")
    drawing.add_title(figure, rows)
    drawing.add_note(
        figure,
        f"{values.shape[1] + 1:,} training samples' gradients.",
        drawing.statistics_note(rows, CONFIDENCE),
        drawing.scale_note(rows, paper),
    )
    return figure


def spectra(rows: Sequence[Row]) -> dict[int, Array]:
    """The eigenvalues of each seed, largest first, those not kept interpolated."""
    found: dict[int, dict[float, float]] = {}
    for row in sorted(rows, key=lambda row: number(row, "index")):
        mine = found.setdefault(int(number(row, "seed")), {})
        mine[number(row, "index")] = number(row, "eigenvalue")
    return {seed: _dense(mine) for seed, mine in found.items()}


def _dense(kept: dict[float, float]) -> Array:
    index = np.arange(1, max(kept) + 1)
    return np.interp(np.log(index), np.log(list(kept)), list(kept.values()))


def judge_spectrum(figure: str, rows: Sequence[Row], num_classes: int) -> list[Claim]:
    """C large eigenvalues, about C² outliers, a flat bulk."""
    C, found = num_classes, list(spectra(rows).values())
    leading = [leaders(values, C) for values in found]
    outlying = [outliers(values, C) for values in found]
    flat = [flatness(values, C) for values in found]
    shares = ", ".join(
        f"{_share(found, num):.0%} in the first {num}" for num in (C, C**2)
    )
    return [
        claim(
            figure,
            "C large eigenvalues",
            "The leading eigenvalues fall fastest, per doubling of the index, at an "
            f"index within a factor {SAME_COUNT:g} of C = {C}.",
            [_near("index of the steepest fall", leading, C, SAME_COUNT)],
            f"Of the variance there is {shares}.",
        ),
        claim(
            figure,
            "about C² outliers",
            f"The number of eigenvalues more than {OUTLIER:g} times above the line of "
            f"the bulk is within a factor {SAME_ORDER:g} of C² = {C**2}.",
            [_near("number of outliers", outlying, C**2, SAME_ORDER)],
        ),
        claim(
            figure,
            "flat bulk",
            f"On logarithmic axes the bulk falls less than {FLAT:g} times as steeply "
            "as the outliers between C and C².",
            [below("slope of the bulk against the outliers'", flat, FLAT)],
            "A power law, which has no bulk, has 1.",
        ),
    ]


def leaders(eigenvalues: Array, num_classes: int) -> float:
    """Index at which the spectrum falls fastest over a doubling of the index.

    NaN if there are too few eigenvalues (N,) to tell.
    """
    candidates = np.arange(2, int(num_classes**1.5) + 1)
    start = np.rint(candidates / math.sqrt(2)).astype(int)
    stop = np.rint(candidates * math.sqrt(2)).astype(int)
    if stop[-1] > len(eigenvalues) or eigenvalues[stop[-1] - 1] <= 0:
        return math.nan
    fall = np.log(eigenvalues[start - 1] / eigenvalues[stop - 1])
    return float(candidates[np.argmax(fall / np.log(stop / start))])


def outliers(eigenvalues: Array, num_classes: int) -> float:
    """How many eigenvalues (N,) stand out of the line of the bulk; NaN as above."""
    line = _bulk(eigenvalues, num_classes)
    if line is None:
        return math.nan
    index = np.arange(1, int(BULK_FROM * num_classes**2))
    above = eigenvalues[: len(index)] / np.exp(np.polyval(line, np.log(index)))
    return float((above > OUTLIER).sum())


def flatness(eigenvalues: Array, num_classes: int) -> float:
    """Slope of the bulk against the slope from C to C²; NaN as above."""
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


def _near(name: str, counts: Sequence[float], target: int, factor: float) -> Finding:
    return between(name, counts, target / factor, target * factor)
