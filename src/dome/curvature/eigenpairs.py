"""Leading eigenpairs of a matrix known by its products, by restarted Lanczos."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dome.curvature.matrix import Curvature
from dome.diagnostics.angles import principal_angles, subspace_overlap

SEED = 0x63757276  # of the first vector, where no generator is given


class DegenerateMatrixError(RuntimeError):
    """A matrix has no leading eigenpairs: it is zero, or not finite."""


@dataclass(frozen=True, slots=True)
class Eigenpairs:
    """The algebraically largest eigenvalues of a matrix and their directions.

    Attributes:
        values: Largest first, shape (K,), float64.
        vectors: Orthonormal columns, shape (D, K), float32 or as asked for.
        num_products: How many products with the matrix they took.
    """

    values: Tensor
    vectors: Tensor
    num_products: int

    def overlap(self, basis: Tensor, num: int | None = None) -> float:
        """How much of the smaller of two subspaces lies in the other, in [0, 1].

        Args:
            basis: Such as a tracker's, shape (D, L).
            num: Take only the first eigenvectors.
        """
        return subspace_overlap(self.leading(num), basis.to(self.vectors))

    def angles(self, basis: Tensor, num: int | None = None) -> Tensor:
        """Principal angles to a basis (D, L), smallest first, in radians."""
        return principal_angles(self.leading(num), basis.to(self.vectors))

    def leading(self, num: int | None = None) -> Tensor:
        """The first eigenvectors, shape (D, num)."""
        known = self.vectors.shape[1]
        if num is not None and not 1 <= num <= known:
            raise ValueError(
                f"num must be between 1 and {known}, the eigenpairs there are, got "
                f"{num}: ask top_eigenpairs for more"
            )
        return self.vectors[:, :num]


def top_eigenpairs(
    matrix: Curvature,
    num: int,
    *,
    tolerance: float = 1e-3,
    max_products: int | None = None,
    num_vectors: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Eigenpairs:
    """The algebraically largest eigenvalues of a symmetric matrix, and their vectors.

    Takes scipy. Two to five times ``num`` products where the eigenvalues lie apart,
    many more where they do not: the last ones are then hardly determined. Holds
    ``num_vectors`` vectors of D float64 numbers.

    Args:
        matrix: Such as a ``Hessian``.
        num: How many, less than D.
        tolerance: Relative error of the eigenvalues that is allowed.
        max_products: Give up after about so many products; 20 for every vector that is
            held if not given.
        num_vectors: Lanczos vectors, more than ``num``: fewer restarts, more memory;
            2 num + 1 (at least 20) if not given.
        generator: Source of the first vector; a fixed seed without it.
        dtype: Of the vectors that are returned.

    Raises:
        RuntimeError: If some eigenpairs have not converged.
        DegenerateMatrixError: If the matrix is zero, or a product not finite.
    """
    linalg, D = _scipy(), matrix.dim
    if not 1 <= num < D:
        raise ValueError(
            f"num must be at least 1 and less than the {D} parameters, got {num}"
        )
    width = min(D, max(2 * num + 1, 20) if num_vectors is None else num_vectors)
    if width <= num:
        raise ValueError(f"num_vectors must be more than num = {num}, got {width}")
    counter = _Counter(matrix)
    operator = linalg.LinearOperator((D, D), matvec=counter, dtype="float64")
    limit = 20 * width if max_products is None else max_products
    try:
        values, vectors = linalg.eigsh(
            operator,
            k=num,
            which="LA",
            tol=tolerance,
            ncv=width,
            # A restart takes ncv − k products.
            maxiter=max(1, (limit - width) // (width - num) + 1),
            v0=_first_vector(D, generator),
        )
    except linalg.ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {num} eigenpairs converged within "
            f"{counter.num_products} products: ask for fewer (num), a larger tolerance "
            f"than {tolerance:g}, more max_products than {limit}, or more num_vectors "
            f"than {width}"
        ) from error
    except linalg.ArpackError as error:
        raise DegenerateMatrixError(
            f"{error} The matrix is zero, or nearly: the loss has no curvature at "
            f"these weights, as when every prediction is certain"
        ) from error
    order = values.argsort()[::-1]
    return Eigenpairs(
        values=torch.from_numpy(values[order].copy()).to(matrix.device),
        vectors=torch.from_numpy(vectors[:, order].copy()).to(matrix.device, dtype),
        num_products=counter.num_products,
    )


class _Counter:
    """Products of a matrix with numpy vectors, counted; refuses what is not finite."""

    def __init__(self, matrix: Curvature) -> None:
        self._matrix = matrix
        self.num_products = 0

    def __call__(self, vector: Any) -> Any:  # noqa: ANN401 (numpy's, which may be absent)
        self.num_products += 1
        v = torch.from_numpy(vector.reshape(-1).copy()).to(self._matrix.device)
        product = self._matrix @ v
        if not product.isfinite().all():
            raise DegenerateMatrixError(
                "a product with the matrix is not finite: the model has diverged, or "
                "overflows at this precision"
            )
        return product.cpu().numpy()


def _first_vector(dim: int, generator: torch.Generator | None) -> Any:  # noqa: ANN401
    if generator is None:
        generator = torch.Generator().manual_seed(SEED)
    device = generator.device
    v = torch.randn(dim, generator=generator, dtype=torch.float64, device=device)
    return v.cpu().numpy()


def _scipy() -> Any:  # noqa: ANN401 (a module)
    try:
        from scipy.sparse import linalg
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "eigenpairs need scipy: pip install 'dome-torch[curvature]'"
        ) from error
    return linalg
