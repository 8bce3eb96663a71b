"""Rows as numbers: curves and end values by seed, means and how far to trust them.

Pictures and verdicts rest on Student t intervals. The paper's percentile bootstrap is
far too narrow for a few seeds: of three it is hardly more than the smallest and the
largest. Correlations are averaged after Fisher's z = artanh ρ, on which they scatter
evenly, so that no interval reaches beyond [-1, 1].

Shapes: S seeds, E epochs. What a row has no number for (None) is NaN here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Value

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
SAME = 1e-9  # relative scatter below which values are the same number

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


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its standard error, on the scale on which it scatters.

    Attributes:
        centre: The mean, of z = artanh ρ for a correlation.
        error: Its standard error there.
        freedom: Degrees of freedom of the t distribution.
        is_correlation: Whether the scale is Fisher's.
    """

    centre: float
    error: float
    freedom: int
    is_correlation: bool = False

    @property
    def mean(self) -> float:
        """The mean as it is told."""
        return self._told(self.centre)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the 95 % interval."""
        half = _t_factor(self.freedom) * self.error
        return self._told(self.centre - half), self._told(self.centre + half)

    def p_above(self, bound: float) -> float:
        """Two-sided p of the mean being above a bound; 1 if it is not.

        It is below 0.05 just when the whole interval lies above.
        """
        return self._p((self.centre - self._scaled(bound)) / self.error)

    def p_below(self, bound: float) -> float:
        """Two-sided p of the mean being below a bound; 1 if it is not."""
        return self._p((self._scaled(bound) - self.centre) / self.error)

    def _p(self, t: float) -> float:
        return min(1.0, 2 * float(stats.t.sf(t, df=self.freedom)))

    def _told(self, value: float) -> float:
        return math.tanh(value) if self.is_correlation else value

    def _scaled(self, bound: float) -> float:
        if not self.is_correlation:
            return bound
        return math.atanh(bound) if abs(bound) < 1 else math.copysign(math.inf, bound)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of independent values, one a seed, assumed to scatter normally.

    Returns:
        None if all are the same number: their scatter is then not known, and an
        interval of no width would claim that it is nil.
    """
    n = _number_of(values)
    mean = math.fsum(values) / n
    error = math.sqrt(_variance(values, mean) / n)
    if error <= SAME * max(abs(value) for value in values):
        return None
    return Estimate(mean, error, n - 1)


def correlation_estimate(correlations: Sequence[float], num_points: int) -> Estimate:
    """The mean of rank correlations, one a seed, by Fisher's z.

    The scatter between seeds is taken to be no less than what chance makes of a single
    ρ of so many points, √(1.06 / (n − 3)) (Fieller, Hartley and Pearson 1957): three
    seeds that happen to agree prove nothing. Points that follow each other in time are
    not independent, so that even this is too narrow.

    Args:
        correlations: Spearman's ρ of each seed.
        num_points: Of how many points each is.
    """
    if num_points < 4:
        raise ValueError(f"Fisher's z needs at least 4 points, got {num_points}")
    num = _number_of(correlations)
    # ρ = ±1 has no finite z; half of the least change of ρ, two neighbours swapped, is
    # taken off.
    most = 1 - 6 / (num_points**3 - num_points)
    z = [math.atanh(max(-most, min(most, rho))) for rho in correlations]
    mean = math.fsum(z) / num
    variance = max(_variance(z, mean), 1.06 / (num_points - 3))
    return Estimate(mean, math.sqrt(variance / num), num - 1, is_correlation=True)


def student_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its 95 % Student t interval.

        mean ± t(n − 1) s / √n

    Args:
        values: One number a seed, at least two, assumed to scatter normally.
    """
    n = _number_of(values)
    mean = math.fsum(values) / n
    return Interval(mean, _t_factor(n - 1) * math.sqrt(_variance(values, mean) / n))


def interval_or_none(values: Sequence[float]) -> Interval | None:
    """The same; None if there are too few values, one is not finite, or all are equal.

    Values that do not scatter say nothing about their scatter: see ``estimate``.
    """
    good = len(values) > 1 and all(map(math.isfinite, values))
    return student_interval(values) if good and estimate(values) else None


def paired_changes(
    after: Mapping[int, float], before: Mapping[int, float]
) -> dict[int, float]:
    """after − before by seed, in order; seeds that have only one are left out."""
    return {s: after[s] - before[s] for s in sorted(after.keys() & before.keys())}


def student_band(values: Array, confidence: float = CONFIDENCE) -> Band:
    """Mean over seeds with its Student t interval, column by column.

    Args:
        values: One seed a row, shape (S, E). A column that is not finite throughout has
            no mean and no interval: NaN. One seed has an interval of no width.
        confidence: For example 0.99.
    """
    band = Band(*(np.full(values.shape[1], np.nan) for _ in range(3)))
    good = np.isfinite(values).all(axis=0)
    if not (len(values) and good.any()):
        return band
    mean, num = values[:, good].mean(axis=0), len(values)
    half = np.zeros_like(mean)
    if num > 1:
        deviation = values[:, good].std(axis=0, ddof=1)
        half = _t_factor(num - 1, confidence) * deviation / math.sqrt(num)
    band.mean[good], band.low[good], band.high[good] = mean, mean - half, mean + half
    return band


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which of several findings stand when all are taken together (Holm 1979).

    The chance that any of those is false stays below the level.

    Args:
        p_values: One a finding; 1 for what was not found.
        level: Of the whole family.
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    stands = [False] * len(p_values)
    for rank, place in enumerate(order):
        if p_values[place] > level / (len(p_values) - rank):
            break
        stands[place] = True
    return stands


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's ρ of two sequences (E,); NaN if one is constant or not finite."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # scipy would warn
        return math.nan
    return float(stats.spearmanr(x, y).statistic)


def _number_of(values: Sequence[float]) -> int:
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least two values, got {n}: add seeds")
    return n


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _t_factor(freedom: int, confidence: float = CONFIDENCE) -> float:
    return float(stats.t.ppf((1 + confidence) / 2, df=freedom))


Curves = dict[int, Array]  # the values of a column by epoch, shape (E,), by seed


def select(rows: Sequence[Row], **columns: Value) -> list[Row]:
    """The rows that have these values in these columns."""
    wanted = columns.items()
    return [row for row in rows if all(row[name] == value for name, value in wanted)]


def distinct(rows: Sequence[Row], column: str) -> list[float]:
    """The numbers in a column, sorted, each once."""
    return sorted({number(row, column) for row in rows if row[column] is not None})


def curves(rows: Sequence[Row], column: str) -> Curves:
    """How a column went in the runs of each seed, epoch by epoch."""
    ordered = sorted(rows, key=lambda row: (number(row, "seed"), number(row, "epoch")))
    found: dict[int, list[float]] = {}
    for row in ordered:
        found.setdefault(int(number(row, "seed")), []).append(number(row, column))
    return {seed: np.asarray(values) for seed, values in found.items()}


def stacked(runs: Curves) -> Array:
    """The curves of all seeds one below the other, shape (S, E)."""
    return np.stack(list(runs.values()))


def averages(rows: Sequence[Row], column: str) -> dict[int, float]:
    """Mean over the epochs of each seed: the area under its curve."""
    return {seed: float(run.mean()) for seed, run in curves(rows, column).items()}


def ends(rows: Sequence[Row], column: str) -> dict[int, float]:
    """The value after the last epoch of each seed."""
    return {seed: float(run[-1]) for seed, run in curves(rows, column).items()}


def number(row: Row, column: str) -> float:
    """A number of a row, NaN for None."""
    value = row[column]
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number in column {column}, got {value!r}")
    return float(value)
