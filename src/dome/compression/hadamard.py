"""A randomised Hadamard transform, subsampled: a linear sketch in O(D log D).

Ailon & Chazelle, The fast Johnson-Lindenstrauss transform, 2009; Tropp, 2011. A
gradient g (D,) is cut into equal blocks, each filled up with zeros to L ≤ 16,384
numbers, N together. It is sent as z = √(N/M) S H E g with random signs E, the
orthonormal Hadamard matrix H of every block, and S that takes M of the N numbers, every
set equally likely; and recovered as √(N/M) E Hᵀ Sᵀ z. Unbiased, for one block with

    E‖C(g) − g‖² = (N/M − 1)(D − 1)/(N − 1) ‖g‖²

and for more hardly more: less noise than a Gaussian sketch of the same size has, spread
evenly over a block as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.compression.noise import random_signs, random_subset
from dome.compression.sketch import Sketch, num_sent

LONGEST = 2**14  # block: long enough to spread, short enough that few zeros are added
RADIX_BITS = 4  # factors of 16 × 16 were the fastest of 2² to 2⁸


class HadamardSketch(Sketch):
    """Compresses a gradient to M = D/rate numbers of a shared random transform.

    Both sides draw signs and positions from (seed, step), on the CPU and so alike on
    every device; nothing of them is sent or stored. Messages of the same step may be
    summed. O(D log D) time, a few copies of the gradient in memory.

    Args:
        rate: D/M, between 1 and D.
        seed: Must be the same on all workers.
        value_dtype: What numbers are sent in: torch.float32, float64 or bfloat16.
    """

    def variance(self, dim: int) -> float:
        """ω with E‖C(g) − g‖² ≤ ω ‖g‖², equal for a single block."""
        M, blocks = num_sent(dim, self.rate), Blocks.of(dim)
        # Zeros take their part of the noise, the same in every entry of a block.
        N = blocks.total
        kept = (N * blocks.used / blocks.length - 1) / max(1, N - 1)
        return (N / M - 1) * kept

    def sent(self, vector: Tensor, step: int) -> Sequence[Tensor]:
        """z = √(N/M) S H E g, shape (M,)."""
        signs, positions, scale = self._draw(len(vector), step, vector)
        filled = Blocks.of(len(vector)).fill(vector * signs)
        return (scale * transform(filled)[positions],)

    def recovered(self, parts: Sequence[Tensor], dim: int, step: int) -> Tensor:
        """√(N/M) E Hᵀ Sᵀ z, shape (D,)."""
        (z,), blocks = parts, Blocks.of(dim)
        signs, positions, scale = self._draw(dim, step, z)
        spread = z.new_zeros(blocks.total).index_copy_(0, positions, z)
        filled = transform_back(spread, blocks.count)
        return blocks.cut(filled, dim) * signs.mul_(scale)

    def _draw(self, dim: int, step: int, like: Tensor) -> tuple[Tensor, Tensor, float]:
        """The signs (D,), the positions (M,) and √(N/M) of a step."""
        M, N = num_sent(dim, self.rate), Blocks.of(dim).total
        random = self.random(step)
        signs = random_signs(dim, random, like)
        positions = random_subset(N, M, random)
        return signs, positions.to(like.device, non_blocking=True), (N / M) ** 0.5


@dataclass(frozen=True, slots=True)
class Blocks:
    """How D numbers are cut: blocks of length L that hold ``used`` numbers each.

    Zeros are shared out evenly. All in the last block, they would take up places of the
    sketch and leave more noise to the others.
    """

    count: int
    used: int
    length: int

    @staticmethod
    def of(dim: int) -> "Blocks":
        """Those for D numbers: as few as there can be, of a power of 2."""
        count = -(-dim // LONGEST)
        used = -(-dim // count)
        return Blocks(count, used, 1 << (used - 1).bit_length())

    @property
    def total(self) -> int:
        """N, all numbers of all blocks."""
        return self.count * self.length

    def fill(self, vector: Tensor) -> Tensor:
        """A vector (D,) in blocks, shape (count, L)."""
        whole = pad(vector, (0, self.count * self.used - len(vector)))
        return pad(whole.view(self.count, self.used), (0, self.length - self.used))

    def cut(self, filled: Tensor, dim: int) -> Tensor:
        """The vector (D,) in blocks of shape (count, L)."""
        return filled[:, : self.used].flatten()[:dim]


def transform(x: Tensor) -> Tensor:
    """H x for every row of x (count, L): all first numbers, all second ones, ..., (N,).

    The lowest bits of the index are transformed and become its highest ones, so that
    the next are at hand: one small product for every four bits, and no copies.
    """
    for H in _factors(x, x.shape[1]):
        x = H @ x.reshape(-1, len(H)).T
    return x.flatten()


def transform_back(y: Tensor, count: int) -> Tensor:
    """The rows (count, L) that ``transform`` makes y (N,) of: the same, backwards."""
    for H in reversed(_factors(y, len(y) // count)):
        y = y.view(len(H), -1).T @ H
    return y.view(count, -1)


def _factors(like: Tensor, length: int) -> list[Tensor]:
    """Orthonormal Hadamard matrices whose Kronecker product is that of order L."""
    H = like.new_ones(1, 1)
    for _ in range(RADIX_BITS):
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    whole, rest = divmod(length.bit_length() - 1, RADIX_BITS)
    orders = [1 << RADIX_BITS] * whole + [1 << rest] * (rest > 0)
    # Corners of a Hadamard matrix are those of lower order.
    return [H[:order, :order] * order**-0.5 for order in orders]
