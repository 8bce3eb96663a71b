"""Whether what arrives is what was sent, asked without waiting for the device.

Bytes are checked by one number over their 32-bit words x₀, x₁, ..., modulo a prime p:

    S = Σ ρᵣ wⱼ xᵢ mod p,    i = L r + j,    wⱼ = 2 j + 1

with a multiplier ρᵣ for every row of L words. A flipped bit changes S, always; other
damage goes unseen about once in p ≈ 4·10⁹ times.

Numbers that are added on their way have other bytes when they arrive. They are checked
by sums, which are added with them (Huang & Abraham, Algorithm-based fault tolerance,
1984): for every block of n numbers z

    c = Σ z/n,    a = Σ |z|/n

and a 1, which counts the messages. Of P messages arrive Z, C and A, and rounding allows

    |Σ Z/n − C| ≤ 2 P ε A

What is further off was damaged; what is nearer is no worse than rounding can be.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.compression.packing import as_dtype

PRIME = 2**32 - 5
ROW = 1024  # words, whose weighted sum fits 64 bits
SPREAD = 0x5851F42D  # of the multipliers, so that rows are not multiples of others
PIECE = 64  # rows
MOST_ADDED = 2**20  # messages: more than there are workers anywhere
BLOCK = 512  # numbers with two sums: a power of 2, to divide by


def checksum(data: Tensor) -> Tensor:
    """S of bytes (N,), an int64 of shape (1,) on their device; O(N)."""
    words = as_dtype(pad(data, (0, -len(data) % (4 * ROW))), torch.int32)
    w = torch.arange(1, 2 * ROW, 2, device=data.device)
    # Piece by piece: as 64-bit integers all words take twice the message's memory.
    pieces = words.view(-1, ROW).split(PIECE)
    rows = torch.cat([(x.to(torch.int64) * w).sum(dim=1) for x in pieces])
    rho = torch.arange(1, len(rows) + 1, device=data.device) * SPREAD % (2**31 - 1)
    return (rows % PRIME * rho % PRIME).sum(dim=0, keepdim=True) % PRIME


def num_sums(count: int) -> int:
    """How many sums travel with so many numbers."""
    return 2 * _num_blocks(count) + 1


def num_before_sums(total: int) -> int:
    """How many of ``total`` numbers are not sums of the others."""
    return total - 1 - 2 * -(-(total - 1) // (BLOCK + 2))


def sums_of(numbers: Tensor) -> Tensor:
    """The sums that travel with numbers (M,), of their dtype."""
    one = torch.ones(1, dtype=torch.float64, device=numbers.device)
    return torch.cat([*_block_sums(numbers), one]).to(numbers.dtype)


def count_and_excess(added: Tensor) -> Tensor:
    """How many messages were added, and how far off they are: (2,), float64.

    Args:
        added: Numbers and behind them their sums, those of P messages added up.

    Returns:
        P, and the largest |Σ Z/n − C| as a multiple of what rounding allows: NaN or
        infinite where a number is.
    """
    M = num_before_sums(len(added))
    if M < 0 or M + num_sums(M) != len(added):  # it was cut off
        return torch.full((2,), torch.nan, dtype=torch.float64, device=added.device)
    num_blocks = _num_blocks(M)
    Z, C, A, P = added.split([M, num_blocks, num_blocks, 1])
    C, A, P = C.double(), A.double(), P.double()
    limits, exact = torch.finfo(added.dtype), torch.finfo(torch.float64)
    # Behind P ε: what this sum may lose itself, and what is too small for the dtype.
    allowed = (2 * P * limits.eps + 2 * BLOCK * exact.eps) * A + 2 * P * limits.tiny
    excess = (_block_sums(Z)[0] - C).abs() / allowed
    worst = torch.cat([excess, torch.zeros_like(P)]).amax(dim=0, keepdim=True)
    return torch.cat([P, worst])


def is_a_count(count: float, dtype: torch.dtype) -> bool:
    """Whether so many messages can have been added up in a dtype: two or more."""
    # Ones add up to no more than 2/ε.
    most = min(MOST_ADDED, 2 / torch.finfo(dtype).eps)
    return 2 <= count <= most and count.is_integer()


def says_nothing(count: float, dtype: torch.dtype) -> bool:
    """Whether rounding hides any damage, as in a sum of 64 messages in bfloat16."""
    return count * torch.finfo(dtype).eps >= 0.5


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _block_sums(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Σ z/n and Σ |z|/n of every block, float64: no larger than the largest number."""
    blocks = pad(numbers / BLOCK, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
    plain = blocks.sum(dim=1, dtype=torch.float64)
    return plain, blocks.abs().sum(dim=1, dtype=torch.float64)
