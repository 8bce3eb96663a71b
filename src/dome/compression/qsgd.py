"""QSGD: entries rounded at random to a few levels of their bucket's norm.

Alistarh et al., QSGD, NeurIPS 2017. In a bucket x of S entries with norm ‖x‖, x_i is
sent as a whole number of s levels: one of the two next to s x_i/‖x‖, with the
probabilities that make it unbiased. With

    E‖C(g) − g‖² ≤ min(S/s², √S/s) ‖g‖²

Levels are packed with a fixed number of bits, so that all messages have one length; the
paper's Elias code is shorter only where nearly all levels are 0.
"""

from dome.compression.buckets import RoundsAtRandom, norms
from dome.compression.noise import DEFAULT_SEED
from dome.compression.packing import width_of

MOST_LEVELS = 127  # a level from −127 to 127 fits a byte


class QSGD(RoundsAtRandom):
    """Sends ⌈log₂(2s + 1)⌉ bits an entry and a float32 norm a bucket. O(D).

    Args:
        num_levels: s, from 1 to 127, beside 0 on either side. 1, 3, 7, 15, ... use
            all values of their 2, 3, 4, 5, ... bits.
        bucket_size: S. One norm for everything (the number of parameters) would give
            noise √D/s times the gradient.
        seed: Source of the rounding.
    """

    def __init__(
        self,
        num_levels: int = 7,
        *,
        bucket_size: int = 512,
        seed: int = DEFAULT_SEED,
    ) -> None:
        if not 1 <= num_levels <= MOST_LEVELS:
            raise ValueError(
                f"num_levels must lie between 1 and {MOST_LEVELS}, got {num_levels}"
            )
        super().__init__(
            f"QSGD(num_levels={num_levels}, bucket_size={bucket_size})",
            seed,
            norms,
            bucket_size=bucket_size,
            num_levels=num_levels,
            num_values=2 ** width_of(2 * num_levels + 1),
        )

    def variance(self, dim: int) -> float:
        """ω = min(S/s², √S/s), with E‖C(g) − g‖² ≤ ω ‖g‖²."""
        S, s = min(self.bucket_size, dim), self.num_levels
        return min(S / s**2, S**0.5 / s)
