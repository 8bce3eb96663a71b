"""Base class of linear sketches: M = D/rate numbers that stand for D."""

import math
from collections.abc import Sequence

import torch

from dome.compression.codec import Codec
from dome.compression.message import check_number_dtype
from dome.compression.noise import DEFAULT_SEED
from dome.compression.packing import Part


class Sketch(Codec):
    """Sends M numbers, a random linear map of the gradient that all workers draw alike.

    Args:
        rate: D/M, between 1 and D.
        seed: Must be the same on all workers.
        value_dtype: What numbers are sent in: torch.float32, float64 or bfloat16.
    """

    is_linear = True
    is_unbiased = True

    def __init__(
        self,
        rate: float,
        *,
        seed: int = DEFAULT_SEED,
        value_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_rate(rate)
        check_number_dtype(value_dtype)
        settings = f"rate={float(rate)}, seed={seed}, value_dtype={value_dtype}"
        super().__init__(f"{type(self).__name__}({settings})", seed)
        self.rate, self.value_dtype = rate, value_dtype

    def parts(self, dim: int) -> Sequence[Part]:
        """M numbers."""
        return [(num_sent(dim, self.rate), self.value_dtype)]


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
