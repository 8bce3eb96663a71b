"""What a compressor is."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dome.compression.message import Message


class Compressor(Protocol):
    """Turns a vector (D,) into a message of few bytes, and back into a vector.

    Messages of vectors of one length have one length, so that they can be gathered.
    Encoding may depend on, and change, what ``state_dict`` holds; decoding does not.
    """

    @property
    def is_linear(self) -> bool:
        """Whether messages of a step may be summed: decode(Σ) is the sum of vectors."""

    @property
    def is_unbiased(self) -> bool:
        """Whether the expectation of the recovered vector is the vector."""

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, all that travels."""

    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,)."""

    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,), of the dtype it had."""

    def __call__(self, vector: Tensor) -> Tensor:
        """The round trip: what arrives of a vector of shape (D,)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit, as tensors."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state."""


class Unbiased(Compressor, Protocol):
    """A compressor whose error has mean zero and a known bound."""

    def variance(self, dim: int) -> float:
        """The least ω with E‖C(g) − g‖² ≤ ω ‖g‖² for every g of shape (D,)."""
