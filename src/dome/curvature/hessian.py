"""The Hessian of the mean loss, ∇²L, by products with vectors (Pearlmutter, 1994)."""

from torch import Tensor, nn
from torch.func import grad

from dome.curvature.matrix import (
    BATCH_SIZE,
    Device,
    Dim,
    LinearMap,
    Loss,
    LossFn,
    Parameters,
    Products,
    pulled,
)
from dome.samples.batches import Batch, Data


class Hessian:
    """Second derivatives of the mean loss over a data set.

        H v = ∂/∂θ ⟨∇L(θ), v⟩

    A product costs about two gradients of the same samples. Batch norm must be in
    evaluation mode.

    Args:
        model: The network; its weights are read anew for every product.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches that can be walked over again.
        batch_size: Samples that are computed at once, of (x, y).
        keep_graphs: Compute gradients once and keep their graphs: saves time, takes
            the memory of a backward pass over all samples, and stays with the weights
            at which the first product was asked for.
    """

    dim, device = Dim(), Device()

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Data,
        *,
        batch_size: int = BATCH_SIZE,
        keep_graphs: bool = False,
    ) -> None:
        self.loss = Loss(model, loss_fn, data, batch_size)
        self._products = Products(self.loss, self._of_batch, keep_graphs=keep_graphs)

    def __matmul__(self, vector: Tensor) -> Tensor:
        """H v for a vector of shape (D,), in float64."""
        return self._products.times(vector)

    def _of_batch(self, theta: Parameters, batch: Batch) -> LinearMap:
        # H is symmetric: what reverse mode gives, vᵀ H, is H v.
        _, product = pulled(grad(lambda p: self.loss.of_batch(p, batch)), theta)
        return product
