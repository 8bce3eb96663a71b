"""Scaled signs: one bit an entry.

Bernstein et al., signSGD, ICML 2018, with the scale of Karimireddy et al., Error
feedback fixes SignSGD, ICML 2019: of a gradient g (D,) the signs and the mean magnitude
are sent,

    C(g) = ‖g‖₁/D · sign(g)

Biased, and for uneven gradients far off: use it inside ``ErrorFeedback``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome.compression.format import Format, from_numbers, to_numbers
from dome.compression.message import Message
from dome.compression.packing import pack_bits, packed_bytes, unpack_bits
from dome.compression.vector import check_vector

SCALE = torch.float32


class SignSGD:
    """Sends the signs, eight a byte, and one scale in float32. O(D).

    An entry of exactly 0 counts as positive, so that one bit is enough.
    """

    is_linear = False
    is_unbiased = False

    def __init__(self) -> None:
        self._format = Format("SignSGD", {}, _body_bytes)

    def __repr__(self) -> str:
        return str(self._format)

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return self._format.num_bits(dim)

    @torch.no_grad()
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,)."""
        check_vector(vector)
        scale = vector.abs().mean(dim=0, keepdim=True, dtype=torch.float64)
        negative = (vector < 0).view(torch.uint8)
        return self._format.write(
            vector, 0, to_numbers(scale, SCALE), pack_bits(negative)
        )

    @torch.no_grad()
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,)."""
        header = self._format.read(message)
        scale = from_numbers(message.body[: SCALE.itemsize], SCALE, header.dtype)
        negative = unpack_bits(message.body[SCALE.itemsize :], header.dim)
        return scale - 2 * scale * negative

    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,)."""
        return self.decode(self.encode(vector))

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: a message depends on the vector alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to load."""


def _body_bytes(dim: int) -> int:
    return SCALE.itemsize + packed_bytes(dim, 1)
