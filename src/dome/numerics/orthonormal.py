"""Orthonormal columns through Gram matrices, for tall matrices that may be deficient.

Shapes: U (D, K) tall, C (K, K) its Gram matrix in float64. Cholesky QR: if C = RᵀR, the
columns of U R⁻¹ are orthonormal. It loses twice the digits that Householder QR loses,
so it is repeated until nothing is left to gain.
"""

import torch
from torch import Tensor

from dome.numerics.linalg import compute_dtype, gram, recombine_, slices
from dome.numerics.shard import Shard

CONVERGING = 1e-3  # error from which the next sweep leaves nothing but rounding
FILLED_ROWS = 4096  # drawn at a time; another number would be other directions
DEPENDENT = 1e-6  # squared norm of what a unit column has of its own, at least


def cholesky_in_order(
    C: Tensor, floor: float, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Upper factor of a Gram matrix that passes over columns dependent on earlier ones.

    Gram-Schmidt on columns with Gram matrix C, unit diagonal: column j is passed over
    if what is left of its squared norm after the earlier ones is not above ``floor``.

    Args:
        C: Gram matrix with ones (or zeros) on its diagonal, float64, shape (K, K).
        floor: Smallest squared norm that counts as a direction.
        most: How many directions there can be; what follows the last is passed over.

    Returns:
        R⁻¹, shape (K, K), zero in the columns passed over, and the squared norms that
        were left, shape (K,).
    """
    L, info = torch.linalg.cholesky_ex(C)
    left = L.diagonal().square()
    enough = most is None or most >= len(C)
    if enough and int(info) == 0 and bool((left > floor).all()):
        eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
        return torch.linalg.solve_triangular(L.T, eye, upper=True), left
    return _gram_schmidt(C, floor, len(C) if most is None else most)


def _gram_schmidt(C: Tensor, floor: float, most: int) -> tuple[Tensor, Tensor]:
    """The same, one column after the other: the path for rank-deficient matrices."""
    inverse, left = torch.zeros_like(C), torch.zeros_like(C[0])
    for j in range(len(C)):
        q = torch.zeros_like(C[0])
        q[j] = 1
        for _ in range(2):  # the second sweep removes what rounding left of the first
            q -= inverse @ (inverse.T @ (C @ q))
        rest = (q @ C @ q).clamp(min=0.0)
        if rest > floor and most > 0:
            left[j], most = rest, most - 1
            inverse[:, j] = q / rest.sqrt()
    return inverse, left


def orthogonality_limit(dtype: torch.dtype, dim: int) -> float:
    """How small |UᵀU − I| can be expected to be for D rows stored in a dtype."""
    eps = torch.finfo(dtype).eps
    if compute_dtype(dtype) == dtype:
        return 4 * eps
    # Rounding to 16 bits perturbs every entry by itself: errors add up as a random
    # walk.
    return 2 * eps / dim**0.5


def orthonormalize_(
    U: Tensor,
    generator: torch.Generator,
    empty: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Make the columns of U orthonormal in place, through repeated Cholesky QR.

    Columns named ``empty``, and any that depend on the others, are filled with random
    directions orthogonal to the rest; the others keep the span they had, in order.

    Args:
        U: Tall matrix, shape (D, K), K at most D.
        generator: Source of the random directions, on U's device.
        empty: Mask of columns to fill, shape (K,).
        shard: Which of all rows those of U are; all, if not given.

    Returns:
        Largest entry of |UᵀU − I| that is left, a scalar.
    """
    K = U.shape[1]
    shard = Shard.whole(len(U)) if shard is None else shard
    fill = (
        torch.zeros(K, dtype=torch.bool, device=U.device)
        if empty is None
        else empty.clone()
    )
    eye = torch.eye(K, dtype=torch.float64, device=U.device)
    target = orthogonality_limit(U.dtype, shard.dim)
    error = eye.new_tensor(torch.inf)
    for _ in range(10):
        if fill.any():
            _fill_(U, fill, generator, shard)
        (C,) = shard.total(gram(U))
        before, error = error, (C - eye).abs().max()
        # Sweeps converge quadratically, once they do, down to rounding.
        settled = error < CONVERGING and error > before / 2
        if not fill.any() and (error <= target or settled):
            break
        order = torch.argsort(fill.to(torch.int8), stable=True)
        norms = C.diagonal().sqrt()
        scaled = (C / norms[:, None] / norms[None, :])[order][:, order]
        inverse, left = cholesky_in_order(scaled.nan_to_num(), floor=DEPENDENT)
        P = torch.zeros_like(C)
        P[order[:, None], order[None, :]] = inverse
        recombine_(U, (P / norms[:, None]).nan_to_num())
        dependent = torch.zeros_like(fill)
        dependent[order] = left <= DEPENDENT
        fill = dependent
    return error


def _fill_(
    U: Tensor, columns: Tensor, generator: torch.Generator, shard: Shard
) -> None:
    """Random columns; a shard draws those of all rows and keeps its own.

    So the directions are the same for any number of workers. A generator cannot be
    moved ahead on every device: that each draws D numbers a column is the price.
    """
    index = columns.nonzero().squeeze(1)
    for rows in slices(shard.dim, FILLED_ROWS):
        num_rows = rows.stop - rows.start
        noise = torch.randn(
            num_rows,
            len(index),
            generator=generator,
            device=U.device,
            dtype=compute_dtype(U.dtype),
        )
        first, last = max(rows.start, shard.start), min(rows.stop, shard.stop)
        if first < last:
            kept = noise[first - rows.start : last - rows.start]
            here = slice(first - shard.start, last - shard.start)
            U[here, index] = (kept / shard.dim**0.5).to(U.dtype)
