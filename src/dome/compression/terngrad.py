"""TernGrad: entries rounded at random to −1, 0 or 1 times their bucket's maximum.

Wen et al., TernGrad, NeurIPS 2017. In a bucket x with maximum m = max |x_i|, x_i is
sent as sign(x_i) with probability |x_i|/m and else as 0. Unbiased, with

    E‖C(g) − g‖² ≤ (√S − 1)/2 · ‖g‖²

for buckets of S entries. The paper has a maximum for each layer; a compressor knows no
layers, and short buckets serve the same end. Its clipping, which is biased, is left
out.
"""

from torch import Tensor

from dome.compression import method
from dome.compression.buckets import (
    check_bucket_size,
    from_levels,
    largest_magnitudes,
    rounded_by,
    scales_of,
)
from dome.compression.fields import Field, trits
from dome.compression.format import Format
from dome.compression.method import Parts
from dome.compression.noise import DEFAULT_SEED, Noise


class TernGrad:
    """Sends five entries a byte and a float32 maximum a bucket. O(D).

    Args:
        bucket_size: S, the number of entries with a common maximum.
        seed: Source of the rounding.
    """

    is_linear = False
    is_unbiased = True

    __repr__, num_bits = method.described, method.num_bits
    encode, decode, __call__ = method.encode, method.decode, method.round_trip
    state_dict, load_state_dict = method.state_dict, method.load_state_dict
    set_worker = method.set_worker

    def __init__(self, *, bucket_size: int = 512, seed: int = DEFAULT_SEED) -> None:
        check_bucket_size(bucket_size)
        self.bucket_size = bucket_size
        self.noise = Noise(seed)
        self.format = Format("TernGrad", {"bucket_size": bucket_size}, self._fields)

    def variance(self, dim: int) -> float:
        """ω = (√S − 1)/2, with E‖C(g) − g‖² ≤ ω ‖g‖²."""
        # E‖C‖² = m ‖x‖₁, which is at most (1 + √S)/2 ‖x‖².
        return (min(self.bucket_size, dim) ** 0.5 - 1) / 2

    def sent(self, vector: Tensor, step: int) -> Parts:
        """Maxima of buckets, and −1, 0 or 1 for each entry, plus 1."""
        random = self.noise.generator(step, vector.device)
        return rounded_by(largest_magnitudes, vector, self.bucket_size, 1, random)

    def recovered(self, parts: Parts, _dim: int, _step: int) -> Tensor:
        """−1, 0 or 1 times their bucket's maximum, shape (D,)."""
        scales, digits = parts
        return from_levels(digits, scales, 1, self.bucket_size)

    def _fields(self, dim: int) -> tuple[Field, ...]:
        return scales_of(dim, self.bucket_size), trits(dim)
