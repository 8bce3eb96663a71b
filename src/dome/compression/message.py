"""What travels: 32 bytes that say what it is, then packed numbers, as one tensor.

    tag | crc32 of all that follows | step | D | dtypes | packed parts

The tag is the crc32 of the compressor's name and settings. Whoever decodes a message
compares it with its own.
"""

import ctypes
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.packing import Part, as_dtype, pack, packed_size, unpack
from dome.compression.vector import DTYPES, all_finite, refuse

FRONT = struct.Struct("<IIQQBB6x")
FRONT_BYTES = FRONT.size  # 32: numbers behind it lie aligned
CHECKED = slice(8, None)  # what the crc32 is of
NUMBER_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SUM_DTYPES = (None, *NUMBER_DTYPES)  # None: messages must not be added

# Tag, step, D, dtype of the vector, dtype of numbers that may be added.
Contents = tuple[int, int, int, torch.dtype, torch.dtype | None]


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
        if len(self.payload) < FRONT_BYTES:
            raise ValueError(
                f"a message has at least {FRONT_BYTES} bytes, this one has "
                f"{len(self.payload)}: it was cut off"
            )

    @property
    def num_bits(self) -> int:
        """Size of all that travels."""
        return 8 * len(self.payload)

    @property
    def body(self) -> Tensor:
        """The packed numbers, shape (N − 32,)."""
        return self.payload[FRONT_BYTES:]

    @property
    def numbers(self) -> Tensor:
        """The numbers in a linear compressor's message, a copy of shape (M,).

        Add them to those of other workers (an all-reduce), then make the message of the
        sum: ``message.with_numbers(total)``.
        """
        *_, dtype = self.opened()
        if dtype is None:
            raise ValueError(
                "messages of a compressor that is not linear cannot be added: gather "
                "them and decode each"
            )
        return as_dtype(self.body, dtype).clone()

    def with_numbers(self, numbers: Tensor) -> "Message":
        """The same message with other numbers of shape (M,), such as a sum."""
        tag, step, dim, dtype, sum_dtype = self.opened()
        body = numbers.contiguous().view(torch.uint8)
        if numbers.dtype != sum_dtype or body.shape != self.body.shape:
            raise ValueError(
                f"this message has {len(self.body)} bytes of {sum_dtype}, got "
                f"{len(body)} of {numbers.dtype}: pass a sum of message.numbers, in "
                "the same dtype"
            )
        return _sealed((tag, step, dim, dtype, sum_dtype), body, _bytes_of(body))

    def opened(self) -> Contents:
        """Tag, step, D, dtype of the vector, and of numbers that may be added.

        Waits for the device. ``ValueError`` if the message is not as it was made.
        """
        data = _bytes_of(self.payload)
        tag, crc, step, dim, kind, sum_kind = FRONT.unpack_from(data)
        if crc != zlib.crc32(memoryview(data)[CHECKED]):
            raise ValueError(
                "the message is damaged or cut off: its checksum is wrong. To add "
                "messages, use sum_messages, or numbers and with_numbers"
            )
        return tag, step, dim, DTYPES[kind], SUM_DTYPES[sum_kind]

    def wrapped(self) -> "Message":
        """The same message with another tag; twice gives the message again.

        A compressor around another marks its messages, so that neither decodes those of
        the other.
        """
        payload = self.payload.clone()
        payload[:4] ^= 255  # the tag: the crc32 leaves it out
        return Message(payload)


def written(
    name: str,
    step: int,
    vector: Tensor,
    kinds: Sequence[Part],
    parts: Sequence[Tensor],
    sum_dtype: torch.dtype | None = None,
) -> Message:
    """The message of a vector (D,); ``ValueError`` if a number is not finite.

    Waits for the device once, for the bytes and for whether all is finite.

    Args:
        name: The compressor, with the settings that decoding depends on.
        step: Number of the step.
        vector: What is compressed.
        kinds: What the parts are.
        parts: Their values, numbers rounded to their kind.
        sum_dtype: That of the one part, if messages may be added.
    """
    pairs = zip(parts, kinds, strict=True)
    body = torch.cat([pack(part, kind) for part, (_, kind) in pairs])
    finite = all_finite([vector, *parts]).view(1).view(torch.uint8)
    data = _bytes_of(torch.cat([body, finite]))
    if not data[-1]:
        refuse(vector, parts)
    front = tag_of(name), step, len(vector), vector.dtype, sum_dtype
    return _sealed(front, body, data[:-1])


def read(
    name: str, message: Message, kinds: Callable[[int], Sequence[Part]]
) -> tuple[list[Tensor], int, int]:
    """The parts of a message, numbers in the dtype of the vector; D; the step.

    Args:
        name: The compressor that reads, as in ``written``.
        message: Refused if it is damaged, or of another compressor or settings.
        kinds: What the parts are, for D numbers.
    """
    tag, step, dim, dtype, _ = message.opened()
    if tag != tag_of(name):
        raise ValueError(
            f"the message was not made by {name}: it is of another compressor or "
            f"other settings, or its tag is damaged"
        )
    parts = kinds(dim)
    pieces = message.body.split([packed_size(part) for part in parts])
    found = [unpack(p, part) for p, part in zip(pieces, parts, strict=True)]
    return arrived(found, dtype), dim, step


def arrived(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Parts as they come out of a message, numbers in the dtype of the vector."""
    # A copy, always: sums over memory aligned in another way may round in another way,
    # and a vector must depend on the bytes of its message alone.
    return [p.to(dtype, copy=True) if p.is_floating_point() else p for p in parts]


def sum_messages(messages: Sequence[Message]) -> Message:
    """The message of the sum of vectors, from their messages by a linear compressor.

    Refused unless all are of the same compressor, settings, step and dimension: only
    then they were made by the same linear map.
    """
    if not messages:
        raise ValueError("there is no message to sum")
    total, first = messages[0].numbers, messages[0].opened()
    for number, message in enumerate(messages[1:], start=1):
        try:
            front = message.opened()
        except ValueError as error:
            raise ValueError(f"message {number} cannot be added: {error}") from error
        if front[1] != first[1]:
            raise ValueError(
                f"messages of steps {first[1]} and {front[1]} cannot be added: each "
                "step uses another sketch"
            )
        if front != first:
            raise ValueError(
                "messages of different compressors, settings or dimensions cannot be "
                "added"
            )
        total += message.numbers
    return messages[0].with_numbers(total)


def tag_of(name: str) -> int:
    """The tag of messages by a compressor of this name."""
    return zlib.crc32(name.encode())


def check_number_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that numbers cannot be sent in."""
    if dtype not in NUMBER_DTYPES:
        raise ValueError(f"value_dtype must be one of {NUMBER_DTYPES}, got {dtype}")


def _sealed(contents: Contents, body: Tensor, data: bytes) -> Message:
    """A message of this body, whose bytes are ``data``."""
    tag, step, dim, dtype, sum_dtype = contents
    kinds = DTYPES.index(dtype), SUM_DTYPES.index(sum_dtype)
    front = bytearray(FRONT.pack(tag, 0, step, dim, *kinds))
    crc = zlib.crc32(data, zlib.crc32(front[CHECKED]))
    FRONT.pack_into(front, 0, tag, crc, step, dim, *kinds)
    there = torch.frombuffer(front, dtype=torch.uint8)
    return Message(torch.cat([there.to(body.device, non_blocking=True), body]))


def _bytes_of(data: Tensor) -> bytes:
    """Bytes of a tensor (N,) of uint8, wherever it lies."""
    here = data.contiguous().cpu()
    # Tensors give their bytes away through numpy only, which need not be installed.
    return ctypes.string_at(here.data_ptr(), len(here)) if len(here) else b""
