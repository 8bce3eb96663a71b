"""The rate D/M: how many of D numbers stand for each of the M that are sent."""

import math


def check_rate(rate: float) -> None:
    """Refuse a rate that is not a number of at least 1."""
    if not (math.isfinite(rate) and rate >= 1):
        raise ValueError(f"rate must be a number of at least 1, got {rate}")


def num_sent(dim: int, rate: float) -> int:
    """M for a gradient of D numbers."""
    if rate > dim:
        raise ValueError(
            f"rate must be at most the number of parameters {dim} (one number "
            f"sent), got {rate}"
        )
    return max(1, round(dim / rate))
