"""The generalised Gauss-Newton matrix (Schraudolph, 2002).

Letters: z = f(θ, x) the predictions, J = ∂z/∂θ, L the mean loss as a function of z.
"""

from torch.func import grad

from dome.curvature.matrix import (
    LinearMap,
    MeanOverBatches,
    Parameters,
    linearized,
    pulled,
)
from dome.samples.batches import Batch


class GaussNewton(MeanOverBatches):
    """The part of the Hessian that comes from the curvature of the loss alone.

        G v = Jᵀ (∂²L/∂z²) J v

    For cross-entropy it is the Fisher matrix of the model's own predictions, for mean
    squared error 2 JᵀJ over the number of predictions. Positive semi-definite if L is
    convex in z. Batch norm must be in evaluation mode.

    Args are those of ``dome.curvature.matrix.MeanOverBatches``.
    """

    def _of_batch(self, theta: Parameters, batch: Batch) -> LinearMap:
        x, y = batch
        z, forward, backward = linearized(lambda p: self.loss.outputs(p, x), theta)
        _, bend = pulled(grad(lambda z: self.loss.loss_fn(z, y)), z)
        return lambda v: backward(bend(forward(v)))
