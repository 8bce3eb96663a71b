"""Curvature of a loss, to compare a tracked basis with.

    H = dome.curvature.Hessian(model, loss_fn, (x, y))
    pairs = dome.curvature.top_eigenpairs(H, 10)
    pairs.overlap(grad_filter.trackers["all"].basis)

Matrices are never formed: they are multiplied with vectors by ``torch.func``, and
``scipy`` finds their leading eigenpairs.
"""

from dome.curvature.covariance import Covariance
from dome.curvature.eigenpairs import DegenerateMatrixError, Eigenpairs, top_eigenpairs
from dome.curvature.gauss_newton import GaussNewton
from dome.curvature.hessian import Hessian
from dome.curvature.matrix import Curvature

__all__ = [
    "Covariance",
    "Curvature",
    "DegenerateMatrixError",
    "Eigenpairs",
    "GaussNewton",
    "Hessian",
    "top_eigenpairs",
]
