"""Random-k sparsification: entries chosen at random, the same by all workers.

Stich, Cordonnier & Jaggi, Sparsified SGD with memory, NeurIPS 2018. Of a gradient
g (D,) k = D/rate entries, every set of k equally likely, are sent; they arrive times
D/k, the others as zeros. Unbiased, with

    E‖C(g) − g‖² = (D/k − 1) ‖g‖²
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome.compression.format import Format, check_number_dtype, from_numbers, to_numbers
from dome.compression.message import Message
from dome.compression.noise import DEFAULT_SEED, Noise, random_subset
from dome.compression.rate import check_rate, num_sent
from dome.compression.vector import check_vector


class RandomK:
    """Sends k = D/rate entries chosen at random, without their indices.

    Both sides draw the indices from (seed, step), so messages of workers at the same
    step hold the same entries and may be summed. O(D) bytes, O(k) numbers.

    Args:
        rate: D/k, between 1 and D.
        seed: Must be the same on all workers.
        value_dtype: What values are sent in: torch.float32, float64 or bfloat16.
    """

    is_linear = True
    is_unbiased = True

    def __init__(
        self,
        rate: float,
        *,
        seed: int = DEFAULT_SEED,
        value_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_rate(rate)
        check_number_dtype(value_dtype)
        self.rate, self.value_dtype = rate, value_dtype
        self._noise = Noise(seed)
        settings = {"rate": float(rate), "seed": seed, "value_dtype": value_dtype}
        self._format = Format("RandomK", settings, self._body_bytes, value_dtype)

    def __repr__(self) -> str:
        return str(self._format)

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, header included."""
        return self._format.num_bits(dim)

    def variance(self, dim: int) -> float:
        """ω = D/k − 1, with E‖C(g) − g‖² = ω ‖g‖²."""
        return dim / num_sent(dim, self.rate) - 1

    @torch.no_grad()
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,), at the next step."""
        check_vector(vector)
        k = num_sent(len(vector), self.rate)
        step = self._noise.next_step()
        values = vector[self._indices(len(vector), step, vector.device)]
        # Scaled here, so that a message holds what arrives.
        numbers = to_numbers(values * (len(vector) / k), self.value_dtype)
        return self._format.write(vector, step, numbers)

    @torch.no_grad()
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,)."""
        header = self._format.read(message)
        values = from_numbers(message.body, self.value_dtype, header.dtype)
        indices = self._indices(header.dim, header.step, values.device)
        return values.new_zeros(header.dim).index_copy_(0, indices, values)

    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,)."""
        return self.decode(self.encode(vector))

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the next step."""
        return self._noise.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on at a saved step."""
        self._noise.load_state_dict(state)

    def _indices(self, dim: int, step: int, device: torch.device) -> Tensor:
        k = num_sent(dim, self.rate)
        return random_subset(dim, k, self._noise.generator(step)).to(device)

    def _body_bytes(self, dim: int) -> int:
        return num_sent(dim, self.rate) * self.value_dtype.itemsize
