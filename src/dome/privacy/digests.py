"""Numbers that tell whether tensors hold the same values, in whatever precision.

Every entry's value is mixed into 64 bits and the numbers are added up, so that a digest
does not depend on the order of entries: samples may be reshaped and transposed. Two
samples that differ have the same digest with a probability of about 2⁻⁶⁴.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Odd, with bits all over: the finaliser of SplitMix64 (Steele et al. 2014).
FIRST, SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Entries that are mixed at once: what a core's cache holds, and what fills a device.
AT_ONCE, AT_ONCE_ON_A_DEVICE = 1 << 16, 1 << 24


def sample_digests(samples: Tensor, dim: int) -> list[int]:
    """One number for each of the samples that lie along a dimension."""
    rows = samples.detach().movedim(dim, 0)
    return [
        number
        for part in _parts(rows)
        for number in _mixed(part).reshape(len(part), -1).sum(dim=1).tolist()
    ]


def digest(values: Tensor) -> int:
    """One number for all entries together."""
    flat = values.detach().reshape(-1)
    total = sum(int(_mixed(part).sum()) for part in _parts(flat))
    return (total + 2**63) % 2**64 - 2**63  # as an int64 would have it


def _parts(rows: Tensor) -> Iterator[Tensor]:
    if rows.numel():
        room = AT_ONCE if rows.is_cpu else AT_ONCE_ON_A_DEVICE
        yield from rows.split(max(1, room * len(rows) // rows.numel()))


def _mixed(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values)
    # A float64 holds what a shorter number or a usual integer holds, exactly; adding
    # zero makes -0 the same as 0, and a copy.
    bits = (values.to(torch.float64) + 0.0).view(torch.int64)
    bits.mul_(FIRST)
    bits.bitwise_xor_(bits >> 32)
    return bits.mul_(SECOND)
