"""Base class of QSGD and TernGrad: buckets rounded at random to levels of a scale.

Shapes: N buckets of S entries, the last one filled up with zeros. With an entry's share
r = x/scale in [−1, 1] of s levels, the level ⌊s r + u⌋, u uniform in [0, 1), has the
expectation s r: rounding at random is unbiased.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.compression.codec import Codec
from dome.compression.packing import Part

SCALE = torch.float32


class RoundsAtRandom(Codec):
    """Sends a scale of every bucket, and for every entry one of 2s + 1 levels.

    Args:
        name: As in ``Codec``.
        seed: Source of the rounding.
        measure: The scale of every bucket, (N, S) → (N, 1), no less than its entries.
        bucket_size: S.
        num_levels: s.
        num_values: What levels are packed as: integers below this number.
    """

    is_unbiased = True

    def __init__(
        self,
        name: str,
        seed: int,
        measure: Callable[[Tensor], Tensor],
        *,
        bucket_size: int,
        num_levels: int,
        num_values: int,
    ) -> None:
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1, got {bucket_size}")
        super().__init__(name, seed)
        self.bucket_size, self.num_levels = bucket_size, num_levels
        self._measure, self._num_values = measure, num_values

    def set_worker(self, index: int) -> None:
        """Say which worker this is: errors of workers are then independent."""
        self.worker = index

    def parts(self, dim: int) -> Sequence[Part]:
        """N scales and D levels."""
        return [(-(-dim // self.bucket_size), SCALE), (dim, self._num_values)]

    def sent(self, vector: Tensor, step: int) -> Sequence[Tensor]:
        """Scales (N,), and levels (D,) from 0 to 2s."""
        buckets = in_buckets(vector, self.bucket_size)
        scales = as_sent(self._measure(buckets))
        random = self.random(step, vector.device)
        levels = round_at_random(buckets, scales, self.num_levels, random)
        return scales.flatten(), levels.flatten()[: len(vector)]

    def recovered(self, parts: Sequence[Tensor], dim: int, _step: int) -> Tensor:
        """The levels as shares of their bucket's scale, shape (D,)."""
        scales, levels = parts
        s = self.num_levels
        signed = in_buckets(levels, self.bucket_size).to(scales.dtype).sub_(s)
        return signed.mul_((scales / s)[:, None]).flatten()[:dim]


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


def nonzero(scales: Tensor) -> Tensor:
    """The scales, with 1 in place of 0 to divide by."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))
