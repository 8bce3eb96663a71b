"""A vector in buckets, each with a scale, rounded at random to a few levels.

Shapes: N buckets of S entries, the last one filled up with zeros. With an entry's share
r = x/scale in [−1, 1] of s levels, the level ⌊s r + u⌋, u uniform in [0, 1), has the
expectation s r: rounding at random is unbiased.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.compression.fields import Field, numbers

SCALE = torch.float32


def check_bucket_size(size: int) -> None:
    """Refuse a size below 1."""
    if size < 1:
        raise ValueError(f"bucket_size must be at least 1, got {size}")


def scales_of(dim: int, size: int) -> Field:
    """The part of a message that holds N scales, for a vector of D numbers."""
    return numbers(-(-dim // size), SCALE)


def rounded_by(
    measure: Callable[[Tensor], Tensor],
    vector: Tensor,
    size: int,
    num_levels: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Scales (N,) and levels (D,) of a vector (D,), rounded at random.

    Args:
        measure: The scale of every bucket, (N, S) → (N, 1).
        vector: Shape (D,).
        size: S.
        num_levels: s.
        generator: Source of the rounding, on the vector's device.
    """
    buckets = in_buckets(vector, size)
    scales = as_sent(measure(buckets))
    levels = round_at_random(buckets, scales, num_levels, generator)
    return scales.flatten(), levels.flatten()[: len(vector)]


def in_buckets(vector: Tensor, size: int) -> Tensor:
    """A vector (D,) in buckets, shape (N, S)."""
    return pad(vector, (0, -len(vector) % size)).reshape(-1, size)


def largest_magnitudes(buckets: Tensor) -> Tensor:
    """max |x| of every bucket, shape (N, 1)."""
    return buckets.abs().amax(dim=1, keepdim=True)


def norms(buckets: Tensor) -> Tensor:
    """‖x‖ of every bucket, shape (N, 1), whatever the size of its entries."""
    # Squares of very small or large entries would vanish or overflow.
    largest = largest_magnitudes(buckets)
    units = buckets / nonzero(largest)
    return largest * torch.linalg.vector_norm(units, dim=1, keepdim=True)


def as_sent(scales: Tensor) -> Tensor:
    """Scales (N, 1) in float32, rounded upwards, or an entry would exceed its scale."""
    sent = scales.to(SCALE)
    upwards = torch.nextafter(sent, torch.full_like(sent, torch.inf))
    return torch.where(sent < scales, upwards, sent)


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
