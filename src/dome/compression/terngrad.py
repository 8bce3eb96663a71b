"""TernGrad: entries rounded at random to −1, 0 or 1 times their bucket's maximum.

Wen et al., TernGrad, NeurIPS 2017. In a bucket x with maximum m = max |x_i|, x_i is
sent as sign(x_i) with probability |x_i|/m and else as 0. Unbiased, with

    E‖C(g) − g‖² ≤ (√S − 1)/2 · ‖g‖²

for buckets of S entries. The paper has a maximum for each layer; a compressor knows no
layers, and short buckets serve the same end. Its clipping, which is biased, is left
out.
"""

from dome.compression.buckets import RoundsAtRandom, largest_magnitudes
from dome.compression.noise import DEFAULT_SEED


class TernGrad(RoundsAtRandom):
    """Sends five entries a byte and a float32 maximum a bucket. O(D).

    Args:
        bucket_size: S, the number of entries with a common maximum.
        seed: Source of the rounding.
    """

    def __init__(self, *, bucket_size: int = 512, seed: int = DEFAULT_SEED) -> None:
        super().__init__(
            f"TernGrad(bucket_size={bucket_size})",
            seed,
            largest_magnitudes,
            bucket_size=bucket_size,
            num_levels=1,
            num_values=3,
        )

    def variance(self, dim: int) -> float:
        """ω = (√S − 1)/2, with E‖C(g) − g‖² ≤ ω ‖g‖²."""
        # E‖C‖² = m ‖x‖₁, which is at most (1 + √S)/2 ‖x‖².
        return (min(self.bucket_size, dim) ** 0.5 - 1) / 2
