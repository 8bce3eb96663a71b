"""What travels: a header of 24 bytes and a body, as one tensor of bytes.

The header says which compressor made the message, with which settings, at which step,
from a vector of which length and dtype, and whether the body is an array of numbers
that may be added to that of another message.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.packing import as_dtype
from dome.compression.vector import DTYPES

MAGIC = 0xD0
# Magic, dtypes, maker, settings, D, step. Numbers behind 24 bytes lie aligned.
LAYOUT = struct.Struct("<BBHIQQ")
HEADER_BYTES = LAYOUT.size
MAKER = slice(2, 4)  # where the maker stands
NUMBER_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SUM_DTYPES = (None, *NUMBER_DTYPES)  # None: the body must not be added


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says about itself.

    Attributes:
        maker: Check sum of the compressor's name.
        settings: Check sum of its settings.
        dim: Length D of the vector.
        step: Number of the step; 0 where no noise depends on it.
        dtype: That of the vector.
        sum_dtype: That of the numbers in the body if they may be added, else None.
    """

    maker: int
    settings: int
    dim: int
    step: int
    dtype: torch.dtype
    sum_dtype: torch.dtype | None

    def to_bytes(self) -> bytes:
        """The 24 bytes."""
        dtypes = DTYPES.index(self.dtype) + 16 * SUM_DTYPES.index(self.sum_dtype)
        return LAYOUT.pack(
            MAGIC, dtypes, self.maker, self.settings, self.dim, self.step
        )

    @staticmethod
    def from_bytes(data: bytes) -> "Header":
        """Read 24 bytes; ``ValueError`` if they are not those of a header."""
        magic, dtypes, maker, settings, dim, step = LAYOUT.unpack(data)
        vector, numbers = dtypes % 16, dtypes // 16
        known = vector < len(DTYPES) and numbers < len(SUM_DTYPES)
        if magic != MAGIC or not known or dim == 0:
            raise ValueError(
                "this is no message of a compressor: its header cannot be read"
            )
        return Header(maker, settings, dim, step, DTYPES[vector], SUM_DTYPES[numbers])


@dataclass(frozen=True, slots=True)
class Message:
    """A compressed vector, as bytes.

    Attributes:
        payload: Everything that travels, uint8 of shape (N,), ready for a gather.
    """

    payload: Tensor

    def __post_init__(self) -> None:
        if self.payload.dtype != torch.uint8 or self.payload.dim() != 1:
            raise ValueError(
                f"a message is a vector of bytes (uint8), got {self.payload.dtype} of "
                f"shape {tuple(self.payload.shape)}"
            )
        if len(self.payload) < HEADER_BYTES:
            raise ValueError(
                f"a message has at least its header of {HEADER_BYTES} bytes, this one "
                f"has {len(self.payload)}: it was cut off"
            )

    @property
    def num_bits(self) -> int:
        """Size of all that travels, header included."""
        return 8 * len(self.payload)

    @property
    def header(self) -> Header:
        """What the message says about itself, read from its first bytes."""
        return Header.from_bytes(bytes(self.payload[:HEADER_BYTES].tolist()))

    @property
    def body(self) -> Tensor:
        """The bytes behind the header, shape (N − 24,)."""
        return self.payload[HEADER_BYTES:]

    @property
    def numbers(self) -> Tensor:
        """The body of a linear compressor's message as numbers, shape (M,).

        The memory is the message's own: adding to it (an all-reduce) changes the
        message to that of the sum.
        """
        dtype = self.header.sum_dtype
        if dtype is None:
            raise ValueError(
                "messages of a compressor that is not linear cannot be added: gather "
                "them and decode each"
            )
        if len(self.body) % dtype.itemsize:
            raise ValueError(
                f"a body of {len(self.body)} bytes holds no {dtype} numbers: it was "
                f"cut off"
            )
        return as_dtype(self.body, dtype)

    def wrapped(self) -> "Message":
        """The same message, marked as another maker's; twice gives the message again.

        A compressor around another marks its messages, so that neither decodes those of
        the other.
        """
        payload = self.payload.clone()
        payload[MAKER] ^= 255
        return Message(payload)


def sum_messages(messages: Sequence[Message]) -> Message:
    """The message of the sum of vectors, from their messages by a linear compressor.

    Refused unless all are of the same compressor, settings, step and dimension: only
    then they were made by the same linear map.
    """
    if not messages:
        raise ValueError("there is no message to sum")
    first = messages[0]
    total = Message(first.payload.clone())
    numbers = total.numbers
    for other in messages[1:]:
        if other.header.step != first.header.step:
            raise ValueError(
                f"messages of steps {first.header.step} and {other.header.step} cannot "
                f"be added: every step has a sketch of its own"
            )
        if other.header != first.header or other.num_bits != first.num_bits:
            raise ValueError(
                "messages of different compressors, settings or dimensions cannot be "
                "added"
            )
        numbers += other.numbers
    return total
