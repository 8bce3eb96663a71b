"""TernGrad: entries rounded at random to −1, 0 or 1 times their bucket's maximum.

Wen et al., TernGrad, NeurIPS 2017. In a bucket x with maximum m = max |x_i|, x_i is
sent as sign(x_i) with probability |x_i|/m and else as 0. Unbiased, with

    E‖C(g) − g‖² ≤ (√S − 1)/2 · ‖g‖²

for buckets of S entries. The paper has a maximum for each layer; a compressor knows no
layers, and short buckets serve the same end. Its clipping, which is biased, is left
out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome.compression.buckets import (
    SCALE,
    as_sent,
    check_bucket_size,
    from_levels,
    in_buckets,
    largest_magnitudes,
    num_buckets,
    round_at_random,
)
from dome.compression.format import Format, from_numbers
from dome.compression.message import Message
from dome.compression.noise import DEFAULT_SEED, Noise
from dome.compression.packing import TRITS, pack_trits, unpack_trits
from dome.compression.vector import check_vector


class TernGrad:
    """Sends five entries a byte and a float32 maximum a bucket. O(D).

    Args:
        bucket_size: S, the number of entries with a common maximum.
        seed: Source of the rounding.
    """

    is_linear = False
    is_unbiased = True

    def __init__(self, *, bucket_size: int = 512, seed: int = DEFAULT_SEED) -> None:
        check_bucket_size(bucket_size)
        self.bucket_size = bucket_size
        self._noise = Noise(seed)
        settings = {"bucket_size": bucket_size}
        self._format = Format("TernGrad", settings, self._body_bytes)

    def __repr__(self) -> str:
        return str(self._format)

    def set_worker(self, index: int) -> None:
        """Say which worker this is: errors of workers are then independent."""
        self._noise.worker = index

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return self._format.num_bits(dim)

    def variance(self, dim: int) -> float:
        """ω = (√S − 1)/2, with E‖C(g) − g‖² ≤ ω ‖g‖²."""
        # E‖C‖² = m ‖x‖₁, which is at most (1 + √S)/2 ‖x‖².
        return (min(self.bucket_size, dim) ** 0.5 - 1) / 2

    @torch.no_grad()
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,), at the next step."""
        check_vector(vector)
        step = self._noise.next_step()
        random = self._noise.generator(step, vector.device)
        buckets = in_buckets(vector, self.bucket_size)
        scales = as_sent(largest_magnitudes(buckets))
        trits = round_at_random(buckets, scales, 1, random).flatten()[: len(vector)]
        return self._format.write(vector, step, scales.flatten(), pack_trits(trits))

    @torch.no_grad()
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,)."""
        header = self._format.read(message)
        end = num_buckets(header.dim, self.bucket_size) * SCALE.itemsize
        scales = from_numbers(message.body[:end], SCALE, header.dtype)
        trits = unpack_trits(message.body[end:], header.dim)
        return from_levels(trits, scales, 1, self.bucket_size)

    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,)."""
        return self.decode(self.encode(vector))

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the next step."""
        return self._noise.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on at a saved step."""
        self._noise.load_state_dict(state)

    def _body_bytes(self, dim: int) -> int:
        scales = num_buckets(dim, self.bucket_size) * SCALE.itemsize
        return scales + -(-dim // TRITS)
