"""How a compressor writes its messages and reads them, refusing those of others."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.compression.checksum import checksum, num_sums, sums_of
from dome.compression.fields import Field
from dome.compression.message import (
    CHECK,
    HEADER_BYTES,
    NUMBER_DTYPES,
    Header,
    Message,
)


@dataclass(frozen=True, slots=True)
class Format:
    """Writes the messages of one compressor, and refuses those of others.

    Attributes:
        name: The compressor's name.
        settings: All that a message can only be decoded with.
        fields: What the body is made of, for a vector of D numbers.
        sum_dtype: That of the numbers in the body if they may be added, else None.
        by_device: Whether only the same kind of device can decode a message.
    """

    name: str
    settings: Mapping[str, object]
    fields: Callable[[int], Sequence[Field]]
    sum_dtype: torch.dtype | None = None
    by_device: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.settings.items())})"

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return 8 * (HEADER_BYTES + self._body_bytes(dim))

    def rounded(self, parts: Sequence[Tensor], dim: int) -> list[Tensor]:
        """The parts of a message, of D numbers, as they will arrive."""
        fields = zip(self.fields(dim), parts, strict=True)
        return [field.rounded(part) for field, part in fields]

    def write(self, vector: Tensor, step: int, parts: Sequence[Tensor]) -> Message:
        """The message of a vector (D,) whose body is made of these parts."""
        header = Header(
            maker=self._maker,
            settings=self._settings(vector.device),
            dim=len(vector),
            step=step,
            dtype=vector.dtype,
            sum_dtype=self.sum_dtype,
        )
        front = torch.tensor(list(header.to_bytes()), dtype=torch.uint8)
        front = front.to(vector.device, non_blocking=True)
        fields = zip(self.fields(len(vector)), parts, strict=True)
        packed = [field.pack(part) for field, part in fields]
        if self.sum_dtype is not None:
            packed += [sums_of(part).view(torch.uint8) for part in parts]
        body = torch.cat(packed)
        check = checksum(body).view(torch.uint8)[: CHECK.size]
        return Message(torch.cat([front, check, body]))

    def read(self, message: Message) -> tuple[Header, list[Tensor]]:
        """Header and parts; ``ValueError`` if it is no whole message of this kind."""
        reading = message.read(self.sum_dtype)
        header, device = reading.header, message.payload.device
        if header.maker != self._maker:
            raise ValueError(
                f"the message was not made by {self.name}, or its header is damaged"
            )
        if (header.settings, header.sum_dtype) != (
            self._settings(device),
            self.sum_dtype,
        ):
            raise ValueError(
                f"the message was made with other settings than those here: "
                f"{self}{self._place(device)}"
            )
        length = self._body_bytes(header.dim)
        if len(message.body) != length:
            raise ValueError(
                f"a message of {header.dim} numbers by {self} has a body of {length} "
                f"bytes, this one has {len(message.body)}"
            )
        reading.check()
        return header, self._unpacked(message.body, header.dim)

    def _unpacked(self, body: Tensor, dim: int) -> list[Tensor]:
        fields = self.fields(dim)
        sizes = [field.num_bytes for field in fields]
        packed = body[: sum(sizes)].split(sizes)
        return [field.unpack(p) for field, p in zip(fields, packed, strict=True)]

    def _body_bytes(self, dim: int) -> int:
        length = sum(field.num_bytes for field in self.fields(dim))
        if self.sum_dtype is None:
            return length
        size = self.sum_dtype.itemsize
        return length + size * num_sums(length // size)

    @property
    def _maker(self) -> int:
        return zlib.crc32(self.name.encode()) & 0xFFFF

    def _settings(self, device: torch.device) -> int:
        return zlib.crc32(f"{self}{self._place(device)}".encode())

    def _place(self, device: torch.device) -> str:
        return f" on {device.type}" if self.by_device else ""


def check_number_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that numbers cannot be sent in."""
    if dtype not in NUMBER_DTYPES:
        raise ValueError(f"value_dtype must be one of {NUMBER_DTYPES}, got {dtype}")
