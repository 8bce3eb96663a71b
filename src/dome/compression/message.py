"""What travels: a header of 32 bytes and a body, as one tensor of bytes.

The header says which compressor made the message, with which settings, at which step,
from a vector of which length and dtype, and whether the body is an array of numbers
that may be added to that of another message. It ends with two check sums, its own and
that of the body; behind numbers that may be added are their sums (``checksum``).
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.checksum import (
    checksum,
    count_and_excess,
    is_a_count,
    says_nothing,
)
from dome.compression.packing import as_dtype
from dome.compression.vector import DTYPES

MAGIC = 0xD1
# Magic, dtypes, maker, settings, D, step.
LAYOUT = struct.Struct("<BBHIQQ")
CHECK = struct.Struct("<I")
HEADER_BYTES = LAYOUT.size + 2 * CHECK.size  # 32: numbers behind it lie aligned
MAKER = slice(2, 4)  # where the maker stands
BODY_CHECK = slice(HEADER_BYTES - CHECK.size, HEADER_BYTES)
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
        """The first 28 bytes: all but the body's check sum."""
        dtypes = DTYPES.index(self.dtype) + 16 * SUM_DTYPES.index(self.sum_dtype)
        data = LAYOUT.pack(
            MAGIC, dtypes, self.maker, self.settings, self.dim, self.step
        )
        return data + CHECK.pack(_own_check(data))

    @staticmethod
    def from_bytes(data: bytes) -> "Header":
        """Read a message's first bytes; ``ValueError`` if they are damaged."""
        front = data[: LAYOUT.size]
        magic, dtypes, maker, settings, dim, step = LAYOUT.unpack(front)
        if magic != MAGIC:
            raise ValueError(
                f"this is no message of a compressor, or its first byte is damaged: "
                f"{magic:#x} instead of {MAGIC:#x}"
            )
        if CHECK.unpack_from(data, LAYOUT.size)[0] != _own_check(front):
            raise ValueError(
                "the message is damaged: its header is not as it was written"
            )
        vector, numbers = dtypes % 16, dtypes // 16
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
        """Size of all that travels, header and check sums included."""
        return 8 * len(self.payload)

    @property
    def header(self) -> Header:
        """What the message says about itself, read from its first bytes."""
        return Header.from_bytes(bytes(self.payload[:HEADER_BYTES].tolist()))

    @property
    def body(self) -> Tensor:
        """The bytes behind the header, shape (N − 32,)."""
        return self.payload[HEADER_BYTES:]

    @property
    def numbers(self) -> Tensor:
        """The body of a linear compressor's message as numbers, and their sums.

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

    def read(self, sum_dtype: torch.dtype | None) -> "Reading":
        """The header, and whether the body is as it was sent; asks the device once.

        Args:
            sum_dtype: That of the body's numbers if they may be added, else None.
        """
        asked = [self.payload[:HEADER_BYTES], checksum(self.body)]
        if sum_dtype is not None and len(self.body) % sum_dtype.itemsize == 0:
            asked.append(count_and_excess(as_dtype(self.body, sum_dtype)))
        answer = bytes(torch.cat([part.view(torch.uint8) for part in asked]).tolist())
        front, rest = answer[:HEADER_BYTES], answer[HEADER_BYTES:]
        (found,), sums = struct.unpack_from("<q", rest), rest[8:]
        count, excess = struct.unpack("<dd", sums) if sums else (1.0, 0.0)
        (sent,) = CHECK.unpack(front[BODY_CHECK])
        return Reading(Header.from_bytes(front), found == sent, count, excess)

    def wrapped(self) -> "Message":
        """The same message, marked as another maker's; twice gives the message again.

        A compressor around another marks its messages, so that neither decodes those of
        the other.
        """
        payload = self.payload.clone()
        payload[MAKER] ^= 255
        return Message(payload)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a message says about itself, and whether its body can be believed.

    Attributes:
        header: What it says.
        is_as_sent: Whether the body has the check sum that it was sent with.
        count: How many messages were added up in it, by its own count.
        excess: How far numbers and their sums are apart, in units of what rounding
            allows.
    """

    header: Header
    is_as_sent: bool
    count: float
    excess: float

    def check(self) -> None:
        """``ValueError`` unless the body is as sent, or a sum of such bodies."""
        if self.is_as_sent:
            return
        dtype = self.header.sum_dtype
        # A flipped bit makes no 2 of a 1: what was not added must be as it was sent.
        if dtype is None or not is_a_count(self.count, dtype):
            raise ValueError(
                "the message is damaged: its body is not as it was sent. Numbers of "
                "messages may be added on their way, and nothing else"
            )
        finite = self.excess < float("inf")
        if self.excess <= 1 or (finite and says_nothing(self.count, dtype)):
            return
        raise ValueError(
            f"the message is damaged, or a sum of messages overflowed: the sums sent "
            f"with the numbers of {self.count:.0f} messages differ from theirs by more "
            f"than rounding does"
        )


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
    header = _checked(first, 0, numbers.dtype)
    for number, other in enumerate(messages[1:], start=1):
        theirs = _checked(other, number, numbers.dtype)
        if theirs.step != header.step:
            raise ValueError(
                f"messages of steps {header.step} and {theirs.step} cannot "
                f"be added: every step has a sketch of its own"
            )
        if theirs != header or other.num_bits != first.num_bits:
            raise ValueError(
                "messages of different compressors, settings or dimensions cannot be "
                "added"
            )
        numbers += other.numbers
    return total


def _checked(message: Message, number: int, sum_dtype: torch.dtype) -> Header:
    reading = message.read(sum_dtype)
    try:
        reading.check()
    except ValueError as error:
        raise ValueError(f"message {number} cannot be added: {error}") from error
    return reading.header


def _own_check(front: bytes) -> int:
    """That of a header's first 24 bytes, but those of the maker: see ``wrapped``."""
    return zlib.crc32(front[: MAKER.start] + front[MAKER.stop :])
