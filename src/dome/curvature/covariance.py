"""The centred covariance of per-sample gradients over a data set, by products.

Letters: N samples, J (N, D) the derivatives of their losses, one gradient a row.
"""

from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from dome.curvature.matrix import (
    OfLoss,
    Parameters,
    differentiable_attention,
    linearized,
)
from dome.samples.batches import Batch


class Covariance(OfLoss):
    """What the filter's basis is an estimate of, without holding N gradients.

        Σ v = Jᵀ (J v − mean of J v) / N

    The model must treat samples independently: batch norm in training mode does not.

    Args are those of ``dome.curvature.matrix.OfLoss``.
    """

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Σ v for a vector of shape (D,), in float64; one walk over the samples."""
        v, layout = self.loss.split(vector), self.loss.layout
        total = torch.zeros(layout.dim, dtype=torch.float64, device=layout.device)
        mean, gradient = total.new_zeros(()), torch.zeros_like(total)
        theta = self.loss.parameters()
        with differentiable_attention():
            for batch, share in self.loss.walk():
                losses_at = partial(self._losses, batch=batch)
                losses, forward, backward = linearized(losses_at, theta)
                slopes = forward(v)
                # Centred within the batch, for digits, and for the rest below.
                shift = slopes.mean()
                weights = (slopes - shift) / len(losses)
                own = self.loss.joined(backward(torch.ones_like(losses) / len(losses)))
                total.add_(self.loss.joined(backward(weights)), alpha=share)
                total.add_(own, alpha=share * float(shift))
                gradient.add_(own, alpha=share)
                mean += share * shift
        return total - mean * gradient

    def _losses(self, theta: Parameters, batch: Batch) -> Tensor:
        x, y = batch
        z = self.loss.outputs(theta, x)
        one = vmap(lambda z, y: self.loss.loss_fn(z[None], y[None]))
        return one(z, y)
