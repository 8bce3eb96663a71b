"""The rate D/M: how many of D numbers stand for each of the M that are sent."""

import math

import torch

from dome.compression.fields import numbers
from dome.compression.format import Format, check_number_dtype


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


def sketch_format(
    name: str,
    rate: float,
    seed: int,
    value_dtype: torch.dtype,
    *,
    by_device: bool = False,
) -> Format:
    """That of a compressor that sends M numbers alone, which may be added.

    Args:
        name: The compressor's name.
        rate: D/M, at least 1.
        seed: Of what decides which numbers these are.
        value_dtype: What they are sent in.
        by_device: Whether only the same kind of device draws the same.
    """
    check_rate(rate)
    check_number_dtype(value_dtype)
    return Format(
        name,
        {"rate": float(rate), "seed": seed, "value_dtype": value_dtype},
        lambda dim: (numbers(num_sent(dim, rate), value_dtype),),
        value_dtype,
        by_device,
    )
