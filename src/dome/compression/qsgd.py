"""QSGD: entries rounded at random to a few levels of their bucket's norm.

Alistarh et al., QSGD, NeurIPS 2017. In a bucket x of S entries with norm ‖x‖, x_i is
sent as a whole number of s levels: one of the two next to s x_i/‖x‖, with the
probabilities that make it unbiased. With

    E‖C(g) − g‖² ≤ min(S/s², √S/s) ‖g‖²

Levels are packed with a fixed number of bits, so that all messages have one length; the
paper's Elias code is shorter only where nearly all levels are 0.
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
    norms,
    num_buckets,
    round_at_random,
)
from dome.compression.format import Format, from_numbers
from dome.compression.message import Message
from dome.compression.noise import DEFAULT_SEED, Noise
from dome.compression.packing import (
    pack_integers,
    packed_bytes,
    unpack_integers,
    width_of,
)
from dome.compression.vector import check_vector

MOST_LEVELS = 127  # a level from −127 to 127 fits a byte


class QSGD:
    """Sends ⌈log₂(2s + 1)⌉ bits an entry and a float32 norm a bucket. O(D).

    Args:
        num_levels: s, from 1 to 127, beside 0 on either side. 1, 3, 7, 15, ... use
            all values of their 2, 3, 4, 5, ... bits.
        bucket_size: S. One norm for everything (the number of parameters) would give
            noise √D/s times the gradient.
        seed: Source of the rounding.
    """

    is_linear = False
    is_unbiased = True

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
        check_bucket_size(bucket_size)
        self.num_levels, self.bucket_size = num_levels, bucket_size
        self._noise = Noise(seed)
        settings = {"num_levels": num_levels, "bucket_size": bucket_size}
        self._format = Format("QSGD", settings, self._body_bytes)

    def __repr__(self) -> str:
        return str(self._format)

    def set_worker(self, index: int) -> None:
        """Say which worker this is: errors of workers are then independent."""
        self._noise.worker = index

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return self._format.num_bits(dim)

    def variance(self, dim: int) -> float:
        """ω = min(S/s², √S/s), with E‖C(g) − g‖² ≤ ω ‖g‖²."""
        S, s = min(self.bucket_size, dim), self.num_levels
        return min(S / s**2, S**0.5 / s)

    @torch.no_grad()
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,), at the next step."""
        check_vector(vector)
        step = self._noise.next_step()
        random = self._noise.generator(step, vector.device)
        buckets = in_buckets(vector, self.bucket_size)
        scales = as_sent(norms(buckets))
        levels = round_at_random(buckets, scales, self.num_levels, random)
        codes = levels.flatten()[: len(vector)]
        return self._format.write(
            vector, step, scales.flatten(), pack_integers(codes, self._width)
        )

    @torch.no_grad()
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,)."""
        header, s = self._format.read(message), self.num_levels
        end = num_buckets(header.dim, self.bucket_size) * SCALE.itemsize
        scales = from_numbers(message.body[:end], SCALE, header.dtype)
        levels = unpack_integers(message.body[end:], header.dim, self._width)
        if int(levels.max()) > 2 * s:
            raise ValueError(f"the message is damaged: a level in it is above {s}")
        return from_levels(levels, scales, s, self.bucket_size)

    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,)."""
        return self.decode(self.encode(vector))

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the next step."""
        return self._noise.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on at a saved step."""
        self._noise.load_state_dict(state)

    @property
    def _width(self) -> int:
        return width_of(2 * self.num_levels + 1)

    def _body_bytes(self, dim: int) -> int:
        scales = num_buckets(dim, self.bucket_size) * SCALE.itemsize
        return scales + packed_bytes(dim, self._width)
