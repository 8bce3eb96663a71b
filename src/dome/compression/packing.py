"""Numbers and small integers packed into bytes, vectorised, on any device.

Integers lie in bit planes: first the lowest bit of every integer, then the next. N
integers of W bits take ⌈N W / 8⌉ bytes; digits 0, 1, 2 lie five to a byte.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# What a part of a message is: how many numbers, and of which kind. A kind is a dtype,
# or n for integers from 0 to n − 1.
Part = tuple[int, torch.dtype | int]

# Integers packed at a time, a multiple of 8: their bits stay in the cache.
CHUNK = 2**16
# Moves bit 0 of byte j of a word to bit 56 + j: one product collects eight bits.
COLLECT = 0x0102040810204080
TRITS = 5  # in a byte: 3⁵ = 243


def packed_size(part: Part) -> int:
    """How many bytes a part of a message takes."""
    count, kind = part
    if isinstance(kind, torch.dtype):
        return count * kind.itemsize
    return -(-count // TRITS) if kind == 3 else packed_bytes(count, width_of(kind))


def pack(values: Tensor, kind: torch.dtype | int) -> Tensor:
    """Values of a kind, shape (N,), as bytes."""
    if isinstance(kind, torch.dtype):
        return values.to(kind).contiguous().view(torch.uint8)
    return pack_trits(values) if kind == 3 else pack_integers(values, width_of(kind))


def unpack(packed: Tensor, part: Part) -> Tensor:
    """The values that were packed; integers as uint8 up to 8 bits, else int64."""
    count, kind = part
    if isinstance(kind, torch.dtype):
        return as_dtype(packed, kind)
    if kind == 3:
        return unpack_trits(packed, count)
    return unpack_integers(packed, count, width_of(kind))


def width_of(num_values: int) -> int:
    """Bits that tell ``num_values`` values apart; 0 for a single one."""
    return (num_values - 1).bit_length()


def packed_bytes(num_integers: int, width: int) -> int:
    """Bytes that ``num_integers`` integers of ``width`` bits take."""
    return -(-num_integers * width // 8)


def pack_integers(values: Tensor, width: int) -> Tensor:
    """Integers in [0, 2^width), shape (N,), as bytes."""
    packed = [
        pack_bits(torch.cat([((piece >> j) & 1).to(torch.uint8) for j in range(width)]))
        for piece in values.split(CHUNK)
        if width
    ]
    return torch.cat(packed) if packed else values.new_empty(0, dtype=torch.uint8)


def unpack_integers(packed: Tensor, count: int, width: int) -> Tensor:
    """The ``count`` integers that were packed, uint8 up to 8 bits and else int64."""
    if width == 1:
        return unpack_bits(packed, count)  # a fifth of the time
    dtype = torch.uint8 if width <= 8 else torch.int64
    values = torch.zeros(count, dtype=dtype, device=packed.device)
    if width == 0:
        return values
    chunks = packed.split(CHUNK * width // 8)
    for piece, chunk in zip(values.split(CHUNK), chunks, strict=True):
        planes = unpack_bits(chunk, width * len(piece)).view(width, len(piece))
        for j in range(width):
            piece.bitwise_or_(planes[j].to(dtype) << j)
    return values


def pack_bits(bits: Tensor) -> Tensor:
    """Zeros and ones, uint8 of shape (N,), eight a byte."""
    words = as_dtype(pad(bits, (0, -len(bits) % 8)), torch.int64) * COLLECT
    return ((words >> 56) & 255).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The ``count`` zeros and ones that were packed, uint8."""
    j = torch.arange(8, device=packed.device)
    spread = ((torch.arange(256, device=packed.device)[:, None] >> j) & 1).byte()
    words = spread.view(torch.int64).squeeze(1).index_select(0, packed.int())
    return words.view(torch.uint8)[:count]


def pack_trits(trits: Tensor) -> Tensor:
    """Digits 0, 1, 2, uint8 of shape (N,), five a byte."""
    groups = pad(trits.byte(), (0, -len(trits) % TRITS)).view(-1, TRITS)
    packed = groups[:, -1]
    for j in reversed(range(TRITS - 1)):
        packed = packed * 3 + groups[:, j]
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """The ``count`` digits that were packed, uint8."""
    powers = 3 ** torch.arange(TRITS, device=packed.device)
    bytes_ = torch.arange(3**TRITS, device=packed.device)
    digits = (bytes_[:, None] // powers % 3).byte()
    return digits.index_select(0, packed.int()).flatten()[:count]


def as_dtype(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes read as numbers: the same memory where it is aligned, else a copy."""
    aligned = packed.is_contiguous() and packed.storage_offset() % dtype.itemsize == 0
    return (packed if aligned else packed.clone()).view(dtype)
