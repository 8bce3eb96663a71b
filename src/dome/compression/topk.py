"""Top-k sparsification: the entries that are largest in magnitude.

Aji & Heafield, Sparse communication for distributed gradient descent, EMNLP 2017. Of a
gradient g (D,) the k = D/rate largest |g_i| are sent as they are, with their indices;
the others arrive as zeros. Biased: use it inside ``ErrorFeedback``.

    ‖C(g) − g‖² ≤ (1 − k/D) ‖g‖²
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dome.compression.codec import Codec
from dome.compression.message import check_number_dtype
from dome.compression.packing import Part
from dome.compression.sketch import check_rate, num_sent

STRIDE, MARGIN = 64, 16


class TopK(Codec):
    """Sends the k = D/rate entries of the largest magnitude.

    A message holds k indices of ⌈log₂ D⌉ bits, in increasing order, and k values.
    O(D).

    Args:
        rate: D/k, between 1 and D. An index costs about as much as a value: the
            message is smaller than the gradient by less than this.
        value_dtype: What values are sent in: torch.float32, float64 or bfloat16.
    """

    def __init__(
        self, rate: float, *, value_dtype: torch.dtype = torch.float32
    ) -> None:
        check_rate(rate)
        check_number_dtype(value_dtype)
        super().__init__(f"TopK(rate={float(rate)}, value_dtype={value_dtype})")
        self.rate, self.value_dtype = rate, value_dtype

    def parts(self, dim: int) -> Sequence[Part]:
        """Values, and indices below D."""
        k = num_sent(dim, self.rate)
        return [(k, self.value_dtype), (k, dim)]

    def sent(self, vector: Tensor, _step: int) -> Sequence[Tensor]:
        """The largest values, and where they are."""
        indices = _largest(vector.abs(), num_sent(len(vector), self.rate))
        return vector[indices], indices

    def recovered(self, parts: Sequence[Tensor], dim: int, _step: int) -> Tensor:
        """Values where they were, zeros elsewhere, shape (D,)."""
        values, indices = parts
        return values.new_zeros(dim).index_copy_(0, indices.long(), values)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of the largest magnitudes (D,), increasing."""
    candidates = _candidates(magnitudes, count)
    largest = magnitudes[candidates].topk(count, sorted=False).indices
    return candidates[largest].sort().values


def _candidates(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of magnitudes that the ``count`` largest are among."""
    # Every 64th entry tells about where twice as many lie, in a quarter of the time
    # that selecting from all takes; should it mislead, all are candidates. Not so on
    # other devices, where their number would have to be waited for.
    sample = magnitudes[::STRIDE]
    rank = 2 * count // STRIDE + MARGIN
    if magnitudes.device.type == "cpu" and rank <= len(sample):
        threshold = sample.topk(rank).values[-1]
        above = (magnitudes >= threshold).nonzero().squeeze(1)
        if len(above) >= count:
            return above
    return torch.arange(len(magnitudes), device=magnitudes.device)
