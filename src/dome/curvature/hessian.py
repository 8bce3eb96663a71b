"""The Hessian of the mean loss, ∇²L, by products with vectors (Pearlmutter, 1994)."""

from torch.func import grad

from dome.curvature.matrix import LinearMap, MeanOverBatches, Parameters, pulled
from dome.samples.batches import Batch


class Hessian(MeanOverBatches):
    """Second derivatives of the mean loss over a data set.

        H v = ∂/∂θ ⟨∇L(θ), v⟩

    A product costs about two gradients of the same samples. Batch norm must be in
    evaluation mode.

    Args are those of ``dome.curvature.matrix.MeanOverBatches``.
    """

    def _of_batch(self, theta: Parameters, batch: Batch) -> LinearMap:
        # H is symmetric: what reverse mode gives, vᵀ H, is H v.
        _, product = pulled(grad(lambda p: self.loss.of_batch(p, batch)), theta)
        return product
