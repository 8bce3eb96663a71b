"""Random-k sparsification: entries chosen at random, the same by all workers.

Stich, Cordonnier & Jaggi, Sparsified SGD with memory, NeurIPS 2018. Of a gradient
g (D,) k = D/rate entries, every set of k equally likely, are sent; they arrive times
D/k, the others as zeros. Unbiased, with

    E‖C(g) − g‖² = (D/k − 1) ‖g‖²
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dome.compression.noise import random_subset
from dome.compression.sketch import Sketch, num_sent


class RandomK(Sketch):
    """Sends k = D/rate entries chosen at random, without their indices.

    Both sides draw the indices from (seed, step), so messages of workers at the same
    step hold the same entries and may be summed. O(D) bytes, O(k) numbers.

    Args:
        rate: D/k, between 1 and D.
        seed: Must be the same on all workers.
        value_dtype: What values are sent in: torch.float32, float64 or bfloat16.
    """

    def variance(self, dim: int) -> float:
        """ω = D/k − 1, with E‖C(g) − g‖² = ω ‖g‖²."""
        return dim / num_sent(dim, self.rate) - 1

    def sent(self, vector: Tensor, step: int) -> Sequence[Tensor]:
        """The chosen entries times D/k, so that a message holds what arrives."""
        indices = self._indices(len(vector), step, vector.device)
        return (vector[indices] * (len(vector) / len(indices)),)

    def recovered(self, parts: Sequence[Tensor], dim: int, step: int) -> Tensor:
        """The entries where they belong, zeros elsewhere, shape (D,)."""
        (values,) = parts
        indices = self._indices(dim, step, values.device)
        return values.new_zeros(dim).index_copy_(0, indices, values)

    def _indices(self, dim: int, step: int, device: torch.device) -> Tensor:
        k = num_sent(dim, self.rate)
        indices = random_subset(dim, k, self.random(step))
        return indices.to(device, non_blocking=True)
