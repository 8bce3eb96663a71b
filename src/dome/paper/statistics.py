"""Means over seeds and how far to trust them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


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
