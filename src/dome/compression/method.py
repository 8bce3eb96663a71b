"""What all compressors do alike: messages, the round trip, state.

A compressor is written as a ``Method``: what it sends of a vector, and what it makes of
that. The functions here are the rest of it. A class takes them by name, and they become
its methods:

    class FirstHalf:
        __repr__, num_bits = method.described, method.num_bits
        encode, decode, __call__ = method.encode, method.decode, method.round_trip
        state_dict, load_state_dict = method.state_dict, method.load_state_dict
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dome.compression.format import Format
from dome.compression.message import Message
from dome.compression.noise import Noise, Silence
from dome.compression.vector import check_finite, check_recovered, check_shape
from dome.numerics.arithmetic import own_arithmetic

Parts = Sequence[Tensor]


class Reader(Protocol):
    """What can be decoded, and how."""

    @property
    def format(self) -> Format:
        """How messages are written: name, settings, fields."""

    def recovered(self, parts: Parts, dim: int, step: int, /) -> Tensor:
        """The vector (D,) made of what was sent, its numbers in the vector's dtype."""


class Method(Reader, Protocol):
    """What makes one compressor different from the others."""

    @property
    def noise(self) -> Noise | Silence:
        """What counts its steps, and gives each its random numbers."""

    def sent(self, vector: Tensor, step: int, /) -> Parts:
        """What is sent of a vector (D,): one tensor for each field of the format."""


class WithNoise(Protocol):
    """A method that rounds at random."""

    @property
    def noise(self) -> Noise:
        """What gives each step its random numbers."""


def described(self: Reader) -> str:
    """Name and settings."""
    return str(self.format)


def num_bits(self: Reader, dim: int) -> int:
    """Size of the message of a vector of D numbers, header included."""
    return self.format.num_bits(dim)


@own_arithmetic
def encode(self: Method, vector: Tensor) -> Message:
    """The message of a vector of shape (D,), at the next step."""
    step, parts = _sent(self, vector)
    check_finite(vector, parts)
    self.noise.advance()
    return self.format.write(vector, step, parts)


@own_arithmetic
def decode(self: Reader, message: Message) -> Tensor:
    """The vector recovered from a message, shape (D,), of the dtype it had."""
    header, parts = self.format.read(message)
    vector = self.recovered(arrived(parts, header.dtype), header.dim, header.step)
    check_recovered(vector)
    return vector


@own_arithmetic
def round_trip(self: Method, vector: Tensor) -> Tensor:
    """What arrives of a vector of shape (D,): the message's, without its bytes."""
    step, parts = _sent(self, vector)
    recovered = self.recovered(arrived(parts, vector.dtype), len(vector), step)
    # All at once: on a device the answer has to be waited for.
    check_finite(vector, [*parts, recovered])
    self.noise.advance()
    return recovered


def set_worker(self: WithNoise, index: int) -> None:
    """Say which worker this is: errors of workers are then independent."""
    self.noise.worker = index


def state_dict(self: Method) -> dict[str, Tensor]:
    """The number of the next step, where one is counted."""
    return self.noise.state_dict()


def load_state_dict(self: Method, state: Mapping[str, Tensor]) -> None:
    """Go on at a saved step."""
    self.noise.load_state_dict(state)


def arrived(parts: Parts, dtype: torch.dtype) -> Parts:
    """Parts as they come out of a message, numbers in the dtype of the vector."""
    # A copy, always: sums over memory aligned in another way may round in another way,
    # and a vector must depend on the bytes of its message alone.
    return [p.to(dtype, copy=True) if p.is_floating_point() else p for p in parts]


def _sent(self: Method, vector: Tensor) -> tuple[int, Parts]:
    """This step and what would be sent in it; a refused vector is no step."""
    check_shape(vector)
    step = self.noise.step
    return step, self.format.rounded(self.sent(vector, step), len(vector))
