"""A vector in buckets, each with a scale, rounded at random to a few levels.

Shapes: N buckets of S entries, the last one filled up with zeros. With an entry's share
r = x/scale in [−1, 1] of s levels, the level ⌊s r + u⌋, u uniform in [0, 1), has the
expectation s r: rounding at random is unbiased.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.compression.format import to_numbers

SCALE = torch.float32


def check_bucket_size(size: int) -> None:
    """Refuse a size below 1."""
    if size < 1:
        raise ValueError(f"bucket_size must be at least 1, got {size}")


def num_buckets(dim: int, size: int) -> int:
    """N for a vector of D numbers."""
    return -(-dim // size)


def in_buckets(vector: Tensor, size: int) -> Tensor:
    """A vector (D,) in buckets, shape (N, S)."""
    return pad(vector, (0, -len(vector) % size)).reshape(-1, size)


def largest_magnitudes(buckets: Tensor) -> Tensor:
    """max |x| of every bucket, shape (N, 1)."""
    return torch.linalg.vector_norm(buckets, ord=torch.inf, dim=1, keepdim=True)


def norms(buckets: Tensor) -> Tensor:
    """‖x‖ of every bucket, shape (N, 1), whatever the size of its entries."""
    # Squares of very small or large entries would vanish or overflow.
    largest = largest_magnitudes(buckets)
    units = buckets / nonzero(largest)
    return largest * torch.linalg.vector_norm(units, dim=1, keepdim=True)


def as_sent(scales: Tensor) -> Tensor:
    """Scales (N, 1) in float32, rounded upwards, or an entry would exceed its scale."""
    sent = to_numbers(scales, SCALE)
    upwards = torch.nextafter(sent, torch.full_like(sent, torch.inf))
    return to_numbers(torch.where(sent < scales, upwards, sent), SCALE)


def round_at_random(
    buckets: Tensor, scales: Tensor, num_levels: int, generator: torch.Generator
) -> Tensor:
    """Levels from −s to s, plus s, uint8 of shape (N, S).

    Args:
        buckets: Entries, shape (N, S).
        scales: What no magnitude in a bucket exceeds, shape (N, 1).
        num_levels: s, at most 127.
        generator: Source of the rounding, on the buckets' device.
    """
    shares = buckets / nonzero(scales.to(buckets.dtype))
    noise = torch.empty_like(buckets).uniform_(generator=generator)
    # Truncation is the floor of what is not negative: s is added first.
    levels = shares.mul_(num_levels).add_(noise).add_(num_levels)
    return levels.clamp_(max=2 * num_levels).byte()


def from_levels(levels: Tensor, scales: Tensor, num_levels: int, size: int) -> Tensor:
    """The vector (D,) that levels (D,) and scales (N,) of buckets of S stand for."""
    signed = in_buckets(levels, size).to(scales.dtype).sub_(num_levels)
    return signed.mul_((scales / num_levels)[:, None]).flatten()[: len(levels)]


def nonzero(scales: Tensor) -> Tensor:
    """The scales, with 1 in place of 0 to divide by."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))
