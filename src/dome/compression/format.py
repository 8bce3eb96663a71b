"""How a compressor writes its messages and reads them, refusing those of others."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.message import HEADER_BYTES, NUMBER_DTYPES, Header, Message
from dome.compression.packing import as_dtype
from dome.compression.vector import all_finite


@dataclass(frozen=True, slots=True)
class Format:
    """Writes the messages of one compressor, and refuses those of others.

    Attributes:
        name: The compressor's name.
        settings: All that a message can only be decoded with.
        body_bytes: Length of the body for a vector of D numbers.
        sum_dtype: That of the numbers in the body if they may be added, else None.
    """

    name: str
    settings: Mapping[str, object]
    body_bytes: Callable[[int], int]
    sum_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.settings.items())})"

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return 8 * (HEADER_BYTES + self.body_bytes(dim))

    def write(self, vector: Tensor, step: int, *parts: Tensor) -> Message:
        """The message of a vector (D,) whose body is made of these parts."""
        header = Header(
            maker=self._maker,
            settings=self._settings,
            dim=len(vector),
            step=step,
            dtype=vector.dtype,
            sum_dtype=self.sum_dtype,
        )
        front = torch.tensor(
            list(header.to_bytes()), dtype=torch.uint8, device=vector.device
        )
        body = [part.contiguous().view(torch.uint8) for part in parts]
        return Message(torch.cat([front, *body]))

    def read(self, message: Message) -> Header:
        """The header; ``ValueError`` if it is no message of this compressor."""
        header = message.header
        if header.maker != self._maker:
            raise ValueError(f"the message was not made by {self.name}")
        if (header.settings, header.sum_dtype) != (self._settings, self.sum_dtype):
            raise ValueError(
                f"the message was made with other settings than those here: {self}"
            )
        length = self.body_bytes(header.dim)
        if len(message.body) != length:
            raise ValueError(
                f"a message of {header.dim} numbers by {self} has a body of {length} "
                f"bytes, this one has {len(message.body)}"
            )
        return header

    @property
    def _maker(self) -> int:
        return zlib.crc32(self.name.encode()) & 0xFFFF

    @property
    def _settings(self) -> int:
        return zlib.crc32(str(self).encode())


def check_number_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that numbers cannot be sent in."""
    if dtype not in NUMBER_DTYPES:
        raise ValueError(f"value_dtype must be one of {NUMBER_DTYPES}, got {dtype}")


def to_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as they are sent; refused where they do not fit the dtype."""
    numbers = values.to(dtype)
    if not all_finite(numbers):
        raise ValueError(
            f"a number to be sent does not fit {dtype}: scale the gradient, or use "
            f"float64 for it and for the values sent"
        )
    return numbers


def from_numbers(packed: Tensor, sent: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Values that were sent, shape (M,); refused where one is not finite."""
    # A copy, always: sums over memory aligned in another way may round in another way,
    # and a vector must depend on the bytes of its message alone.
    values = as_dtype(packed, sent).to(dtype, copy=True)
    if not all_finite(values):
        raise ValueError(
            "the message is damaged, or a sum of messages overflowed: a number in it "
            "is not finite"
        )
    return values
