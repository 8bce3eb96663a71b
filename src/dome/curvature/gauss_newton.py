"""The generalised Gauss-Newton matrix (Schraudolph, 2002).

Letters: z = f(θ, x) the predictions, J = ∂z/∂θ, L the mean loss as a function of z.
"""

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
    linearized,
    pulled,
)
from dome.samples.batches import Batch, Data


class GaussNewton:
    """The part of the Hessian that comes from the curvature of the loss alone.

        G v = Jᵀ (∂²L/∂z²) J v

    For cross-entropy it is the Fisher matrix of the model's own predictions, for mean
    squared error 2 JᵀJ over the number of predictions. Positive semi-definite if L is
    convex in z. Batch norm must be in evaluation mode.

    Args:
        model: The network; its weights are read anew for every product.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches that can be walked over again.
        batch_size: Samples that are computed at once, of (x, y).
        keep_graphs: Compute Jacobians once and keep their graphs: saves time, takes
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
        """G v for a vector of shape (D,), in float64."""
        return self._products.times(vector)

    def _of_batch(self, theta: Parameters, batch: Batch) -> LinearMap:
        x, y = batch
        z, forward, backward = linearized(lambda p: self.loss.outputs(p, x), theta)
        _, bend = pulled(grad(lambda z: self.loss.loss_fn(z, y)), z)
        return lambda v: backward(bend(forward(v)))
