"""Directions that do not depend on each other, and what makes them orthonormal.

Shapes: U (D, K) directions, independent but not orthogonal; N = UᵀU (K, K). With
T = R⁻¹ of the Cholesky factor N = RᵀR, the columns of U T are orthonormal.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dome.trackers.directions import Directions
from dome.trackers.linalg import DEPENDENT, IsTrue, inverse_cholesky, sweep

ATTEMPTS = 8  # to find random directions that do not depend on others


@dataclass(frozen=True, slots=True)
class Independent:
    """Directions and what makes them orthonormal.

    Attributes:
        U: The directions.
        N: Their Gram matrix, shape (K, K).
        T: What makes them orthonormal, shape (K, K).
        is_finite: Whether they are.
        fresh: Mask of those that are random, shape (K,); None if none is.
    """

    U: Directions
    N: Tensor
    T: Tensor
    is_finite: bool = True
    fresh: Tensor | None = None


def independent(
    U: Directions, random: Callable[[int], Directions], is_true: IsTrue = bool
) -> Independent:
    """Directions, with random ones where they are zero or depend on others.

    Args:
        U: The directions.
        random: Gives K random ones, by the number of the attempt.
        is_true: What to believe of there being none such.
    """
    N = U.gram(U)
    T, own = inverse_cholesky(N)
    is_finite = is_true(N.sum().isfinite())
    if is_finite and not is_true(own.min() > DEPENDENT):
        return _filled(U, N, random)
    # As it comes out of a file: products round in an order that strides decide.
    return Independent(U, N, T.contiguous(), is_finite)


def _filled(
    U: Directions, N: Tensor, random: Callable[[int], Directions]
) -> Independent:
    fresh = N.diagonal() <= 0
    T, missing = sweep(N, fresh)
    for attempt in range(ATTEMPTS):
        fresh = fresh | missing
        U = U.replaced(missing, random(attempt))
        N = U.gram(U)
        # Behind the others, which keep the span that they had, in order.
        T, missing = sweep(N, fresh)
        if not missing.any():
            break
    return Independent(U, N, T.contiguous(), fresh=fresh)
