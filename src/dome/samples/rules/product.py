"""Batched products written straight into the rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Numbers worked on at a time. They fit the cache, and the allocator hands out the same
# memory for the next chunk instead of asking the system for fresh pages, whose first
# touch costs more than the product: at B = 128 chunks are up to three times faster.
_CHUNK_SIZE = 1 << 18
_CHUNK_LENGTH = 16

# Torch loops over the samples when the result is not contiguous, as rows are not; below
# this size of a sample's result, a contiguous product and a copy are faster.
_SMALL = 1 << 15


def chunks(
    num: int, size: int, most: int = _CHUNK_LENGTH, budget: int = _CHUNK_SIZE
) -> Iterator[slice]:
    """Cut ``num`` samples with ``size`` numbers each into pieces to work on."""
    fitting = min(max(budget // size, 1), most)
    # Kernels are prepared for each shape anew: powers of two leave fewer odd ends.
    length = 1 << (fitting.bit_length() - 1)
    return (slice(i, i + length) for i in range(0, num, length))


def product(a: Tensor, b: Tensor, room: Tensor | None) -> Tensor:
    """Product of (B, m, t) and (B, t, n), shape (B, m, n), into ``room`` if given."""
    if a.shape[2] == 1:
        return torch.mul(a, b, out=room)
    size = a.shape[1] * b.shape[2]
    if room is None or size >= _SMALL:
        return torch.bmm(a, b, out=room)
    for part in chunks(a.shape[0], size):
        room[part].copy_(torch.bmm(a[part], b[part]))
    return room
