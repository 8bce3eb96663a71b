"""Means over seeds and how far to trust them.

Pictures show percentile bootstrap intervals, as the paper does. Verdicts rest on
Student t intervals: the bootstrap of three seeds is far too narrow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the half width of its confidence interval."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval lies on that side of zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True, slots=True)
class Band:
    """A mean line and the interval around it.

    Attributes:
        mean: Shape (E,).
        low: Lower ends, shape (E,).
        high: Upper ends, shape (E,).
    """

    mean: Array
    low: Array
    high: Array


def student_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its 95 % Student t interval.

        mean ± t(n − 1) s / √n

    Args:
        values: One number a seed, at least two, assumed to scatter normally.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least two values, got {n}: add seeds")
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, df=n - 1))
    return Interval(mean, t * math.sqrt(variance / n))


def interval_or_none(values: Sequence[float]) -> Interval | None:
    """The same; None if there are too few values, or one is not finite."""
    good = len(values) > 1 and all(map(math.isfinite, values))
    return student_interval(values) if good else None


def paired_changes(
    after: Mapping[int, float], before: Mapping[int, float]
) -> dict[int, float]:
    """after − before by seed, in order; seeds that have only one are left out."""
    return {s: after[s] - before[s] for s in sorted(after.keys() & before.keys())}


def bootstrap_band(values: Array, confidence: float) -> Band:
    """Mean over seeds with a percentile bootstrap interval, the same at every call.

    Args:
        values: One seed a row, shape (S, E). A column that is not finite throughout has
            no mean and no interval: NaN. One seed has an interval of no width.
        confidence: For example 0.99.
    """
    band = Band(*(np.full(values.shape[1], np.nan) for _ in range(3)))
    good = np.isfinite(values).all(axis=0)
    if not (len(values) and good.any()):
        return band
    band.mean[good] = values[:, good].mean(axis=0)
    if len(values) == 1:
        band.low[good] = band.high[good] = band.mean[good]
        return band
    ends = stats.bootstrap(
        (values[:, good],),
        np.mean,
        axis=0,
        confidence_level=confidence,
        n_resamples=NUM_RESAMPLES,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    band.low[good], band.high[good] = ends.low, ends.high
    return band


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's ρ of two sequences (E,); NaN if one is constant or not finite."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # scipy would warn
        return math.nan
    return float(stats.spearmanr(x, y).statistic)
