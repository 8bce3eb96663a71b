"""What the body of a message is made of: numbers, integers, bits, ternary digits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.packing import (
    TRITS,
    as_dtype,
    pack_bits,
    pack_integers,
    pack_trits,
    packed_bytes,
    unpack_bits,
    unpack_integers,
    unpack_trits,
)


@dataclass(frozen=True, slots=True)
class Field:
    """A part of a message: a tensor (N,) whose size in bytes is known beforehand.

    Attributes:
        num_bytes: That size.
        pack: Turns the part into bytes.
        unpack: Turns bytes into the part.
        dtype: What numbers are rounded to; None where they are no such numbers.
    """

    num_bytes: int
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    dtype: torch.dtype | None = None

    def rounded(self, part: Tensor) -> Tensor:
        """The part as it will arrive."""
        return part if self.dtype is None else part.to(self.dtype)


def numbers(count: int, dtype: torch.dtype) -> Field:
    """Numbers of one dtype."""
    return Field(
        count * dtype.itemsize,
        lambda part: part.contiguous().view(torch.uint8),
        lambda packed: as_dtype(packed, dtype),
        dtype,
    )


def integers(count: int, width: int) -> Field:
    """Integers in [0, 2^width); they come back as uint8 up to 8 bits, else int64."""
    return Field(
        packed_bytes(count, width),
        lambda part: pack_integers(part, width),
        lambda packed: unpack_integers(packed, count, width),
    )


def bits(count: int) -> Field:
    """Zeros and ones, uint8, eight a byte."""
    return Field(
        packed_bytes(count, 1), pack_bits, lambda packed: unpack_bits(packed, count)
    )


def trits(count: int) -> Field:
    """Digits 0, 1, 2, uint8, five a byte."""
    return Field(
        -(-count // TRITS), pack_trits, lambda packed: unpack_trits(packed, count)
    )
