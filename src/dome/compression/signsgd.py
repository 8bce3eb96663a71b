"""Scaled signs: one bit an entry.

Bernstein et al., signSGD, ICML 2018, with the scale of Karimireddy et al., Error
feedback fixes SignSGD, ICML 2019: of a gradient g (D,) the signs and the mean magnitude
are sent,

    C(g) = ‖g‖₁/D · sign(g)

Biased, and for uneven gradients far off: use it inside ``ErrorFeedback``.
"""

import torch
from torch import Tensor

from dome.compression import method
from dome.compression.fields import bits, numbers
from dome.compression.format import Format
from dome.compression.method import Parts
from dome.compression.noise import Silence

SCALE = torch.float32


class SignSGD:
    """Sends the signs, eight a byte, and one scale in float32. O(D).

    An entry of exactly 0 counts as positive, so that one bit is enough.
    """

    is_linear = False
    is_unbiased = False

    __repr__, num_bits = method.described, method.num_bits
    encode, decode, __call__ = method.encode, method.decode, method.round_trip
    state_dict, load_state_dict = method.state_dict, method.load_state_dict

    def __init__(self) -> None:
        self.noise = Silence()
        self.format = Format("SignSGD", {}, lambda dim: (numbers(1, SCALE), bits(dim)))

    def sent(self, vector: Tensor, _step: int) -> Parts:
        """The mean magnitude, and which entries are negative."""
        scale = vector.abs().mean(dim=0, keepdim=True, dtype=torch.float64)
        return scale, (vector < 0).view(torch.uint8)

    def recovered(self, parts: Parts, _dim: int, _step: int) -> Tensor:
        """The signs times the scale, shape (D,)."""
        scale, negative = parts
        return negative.to(scale.dtype).mul_(-2).add_(1).mul_(scale)
