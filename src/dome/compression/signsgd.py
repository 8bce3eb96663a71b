"""Scaled signs: one bit an entry.

Bernstein et al., signSGD, ICML 2018, with the scale of Karimireddy et al., Error
feedback fixes SignSGD, ICML 2019: of a gradient g (D,) the signs and the mean magnitude
are sent,

    C(g) = ‖g‖₁/D · sign(g)

Biased, and for uneven gradients far off: use it inside ``ErrorFeedback``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dome.compression.codec import Codec
from dome.compression.packing import Part

SCALE = torch.float32


class SignSGD(Codec):
    """Sends the signs, eight a byte, and one scale in float32. O(D).

    An entry of exactly 0 counts as positive, so that one bit is enough.
    """

    def __init__(self) -> None:
        super().__init__("SignSGD()")

    def parts(self, dim: int) -> Sequence[Part]:
        """The scale, and a bit for each entry."""
        return [(1, SCALE), (dim, 2)]

    def sent(self, vector: Tensor, _step: int) -> Sequence[Tensor]:
        """The mean magnitude, and which entries are negative."""
        scale = vector.abs().mean(dim=0, keepdim=True, dtype=torch.float64)
        return scale, (vector < 0).view(torch.uint8)

    def recovered(self, parts: Sequence[Tensor], _dim: int, _step: int) -> Tensor:
        """The signs times the scale, shape (D,)."""
        scale, negative = parts
        return negative.to(scale.dtype).mul_(-2).add_(1).mul_(scale)
