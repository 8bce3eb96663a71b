"""Orthonormal columns through Gram matrices, for tall matrices that may be deficient.

Shapes: U (D, K) tall, C (..., K, K) Gram matrices in float64. Cholesky QR: if C = RᵀR,
the columns of U R⁻¹ are orthonormal. It loses twice the digits that Householder QR
loses, so it is repeated until nothing is left to gain.
"""

import torch
from torch import Tensor

from dome.numerics.cpu import slices
from dome.numerics.passes import compute_dtype, gram, recombine_
from dome.numerics.shard import Shard
from dome.numerics.together import Ask, IsTrue, Small, Steps, Sum, looked_up

CONVERGING = 1e-3  # error from which the next sweep leaves nothing but rounding
FILLED_ROWS = 4096  # drawn at a time; another number would be other directions
DEPENDENT = 1e-6  # squared norm of what a unit column has of its own, at least


def inverse_cholesky(C: Tensor) -> tuple[Tensor, Tensor]:
    """R⁻¹ of C = RᵀR (..., K, K), and what each column has of its own, (..., K).

    That is its squared norm after the earlier columns are taken out, as a share of its
    squared norm before: all zero where C has no Cholesky factor.
    """
    C, lengths = _with_unit_diagonal(C)
    L, info = torch.linalg.cholesky_ex(C)
    own = L.diagonal(dim1=-2, dim2=-1).square() * (info == 0).unsqueeze(-1)
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device).expand_as(C)
    inverse = torch.linalg.solve_triangular(L.mT, eye, upper=True)
    return inverse / lengths.unsqueeze(-1), own


def gram_schmidt(C: Tensor, floor: float, most: int) -> tuple[Tensor, Tensor]:
    """The same for a deficient C: columns that depend on earlier ones are passed over.

    Args:
        C: Gram matrices, float64, shape (..., K, K).
        floor: What a column must have of its own to count as a direction.
        most: How many directions there can be; what follows the last is passed over.

    Returns:
        R⁻¹, zero in the columns passed over, and what each column has of its own, zero
        for those.
    """
    C, lengths = _with_unit_diagonal(C)
    inverse, own = torch.zeros_like(C), torch.zeros_like(lengths)
    found = torch.zeros_like(lengths[..., 0])
    for j in range(C.shape[-1]):
        q = torch.zeros_like(C[..., :1])
        q[..., j, :] = 1
        for _ in range(2):  # the second sweep removes what rounding left of the first
            q = q - inverse @ (inverse.mT @ (C @ q))
        rest = (q.mT @ C @ q)[..., 0, 0].clamp(min=0.0)
        counts = (rest > floor) & (found < most)
        found = found + counts
        own[..., j] = torch.where(counts, rest, 0.0)
        column = q[..., 0] * torch.where(counts, rest, torch.inf).rsqrt().unsqueeze(-1)
        inverse[..., j] = column
    return inverse / lengths.unsqueeze(-1), own


def upper_factor(
    core: Tensor, floor: float, most: int, is_true: IsTrue = looked_up
) -> tuple[Tensor, Tensor]:
    """R of core = Q R with positive diagonal, and its inverse.

    Args:
        core: Symmetric, float64, shape (K, K).
        floor: Squared share that a column must have of its own.
        most: How many directions there can be.
        is_true: What to believe of there being K.

    Returns:
        R, zero in the rows of columns that depend on earlier ones, and R⁻¹, zero in
        their columns.
    """
    _, R = torch.linalg.qr(core)
    R = R * R.diagonal().sign()[:, None]
    own = (R.diagonal() / torch.linalg.vector_norm(core, dim=0)).square()
    if most >= len(core) and is_true((own > floor).all()):
        eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
        return R, torch.linalg.solve_triangular(R, eye, upper=True)
    # Through squares of the columns' lengths, which must not leave the range.
    size = torch.linalg.matrix_norm(core)
    size = torch.where(size > 0, size, 1.0)
    unit = core / size
    squared = unit @ unit
    inverse, _ = gram_schmidt(squared, floor, most)
    return inverse.T @ squared * size, inverse / size


def _with_unit_diagonal(C: Tensor) -> tuple[Tensor, Tensor]:
    """C for columns of length one, and the lengths (..., K); 1 for zero columns."""
    squares = C.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt()
    return C / lengths.unsqueeze(-1) / lengths.unsqueeze(-2), lengths


def orthogonality_limit(dtype: torch.dtype, dim: int) -> float:
    """How small |UᵀU − I| can be expected to be for D rows stored in a dtype."""
    eps = torch.finfo(dtype).eps
    if compute_dtype(dtype) == dtype:
        return 4 * eps
    # Rounding to 16 bits perturbs every entry by itself: errors add up as a random
    # walk.
    return 2 * eps / dim**0.5


def orthonormalize_(
    U: Tensor, generator: torch.Generator, shard: Shard, fill: Tensor, num_filled: int
) -> Steps[Tensor]:
    """Make the columns of U orthonormal in place, through repeated Cholesky QR.

    Columns in ``fill``, and any that depend on the others, are replaced by random
    directions orthogonal to the rest; the others keep the span they had, in order.

    Args:
        U: Tall matrix, shape (D, K), K at most D, the rows held here.
        generator: Source of the random directions, on U's device.
        shard: Which rows these are.
        fill: Mask of columns to fill, shape (K,).
        num_filled: How many these are.

    Returns:
        Largest entry of |UᵀU − I| that is left, a scalar.
    """
    limit, in_doubt = orthogonality_limit(U.dtype, shard.dim), num_filled > 0
    for _ in range(10):
        if num_filled:
            _fill_(U, fill, num_filled, generator, shard)
        if in_doubt:
            (C,) = yield Sum(shard.total, (gram(U),))
            P, fill = yield Small(sweep, (C, fill))
            recombine_(U, P)
        (C,) = yield Sum(shard.total, (gram(U),))
        left, missing = yield Ask((_error(C), fill.sum()))
        num_filled, in_doubt = int(missing), True
        if not num_filled and left <= limit:
            break
        # Sweeps converge quadratically, once they do: one more leaves rounding alone.
        if not num_filled and left < CONVERGING and left * len(C) < 0.5:
            P, _ = yield Small(inverse_cholesky, (C,))
            recombine_(U, P)
            (C,) = yield Sum(shard.total, (gram(U),))
            break
    return _error(C)


def _error(C: Tensor) -> Tensor:
    """Largest entry of |C − I|."""
    return (C - torch.eye(len(C), dtype=C.dtype, device=C.device)).abs().max()


def sweep(C: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    """What makes columns with Gram matrix C orthonormal, those to fill behind others.

    Returns:
        P, shape (..., K, K), zero in columns that depend on others, and a mask of them.
    """
    order = torch.argsort(fill.to(torch.int8), dim=-1, stable=True)
    places = order.unsqueeze(-1).expand_as(C)
    ordered = C.gather(-2, places).gather(-1, places.mT)
    inverse, own = gram_schmidt(ordered, DEPENDENT, C.shape[-1])
    back = torch.argsort(order, dim=-1)
    places = back.unsqueeze(-1).expand_as(C)
    P = inverse.gather(-2, places).gather(-1, places.mT)
    return P, own.gather(-1, back) <= DEPENDENT


def _fill_(
    U: Tensor,
    columns: Tensor,
    num_columns: int,
    generator: torch.Generator,
    shard: Shard,
) -> None:
    """Random columns; a shard draws those of all rows and keeps its own.

    So the directions are the same for any number of workers. A generator cannot be
    moved ahead on every device: that each draws D numbers a column is the price.
    """
    index = torch.argsort(columns.to(torch.int8), descending=True, stable=True)
    index = index[:num_columns]
    for rows, meetings in shard.meet(slices(shard.dim, FILLED_ROWS)):
        noise = torch.randn(
            rows.stop - rows.start,
            num_columns,
            generator=generator,
            device=U.device,
            dtype=compute_dtype(U.dtype),
        )
        for drawn, here in meetings:
            U[here, index] = (noise[drawn] / shard.dim**0.5).to(U.dtype)
