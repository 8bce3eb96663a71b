"""What a step tells about its samples, before the noise, with its sensitivity.

Shapes: G (B, D) samples, U (D, K) a basis that none of these samples has turned, C the
clipping norm. Sensitivity: how far a sum moves, in Euclidean (Frobenius) norm, when one
sample joins the batch or leaves it. docs/privacy.md has the derivations.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MOMENT_SENSITIVITY = math.sqrt(2)  # of ``second_moment_``, in units of C²
# Rounding of a norm and of a scaled row must not carry it beyond C.
SAFETY = 1e-6
ROWS_AT_ONCE = 4
ENTRIES_AT_ONCE = 1 << 18  # what a core's cache holds in float64


def without_span_(grads: Tensor, basis: Tensor) -> None:
    """G ← G − G U Uᵀ, row by row: what is clipped is what is formed here.

    A norm from ‖g‖² − ‖Uᵀ g‖² would be cheaper, and wrong by rounding exactly where
    nearly all of a sample is removed, so that clipping would not bound it.
    """
    grads.addmm_(grads @ basis, basis.T, alpha=-1)


def clipping_factors_(grads: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖g_i‖) for every row, (B,) in float64; rows not finite are zeroed.

    A sample that is not finite contributes nothing, as if its gradient were zero: one
    bad sample must not decide what is released.
    """
    norms = row_norms(grads)
    bad = norms.isfinite().logical_not()
    grads[bad] = 0.0
    limit = max_norm * (1 - SAFETY)
    return torch.where(bad, 0.0, (limit / norms).clamp(max=1.0))


def row_norms(grads: Tensor) -> Tensor:
    """‖g_i‖ of every row, shape (B,), in float64: a norm too small would clip less."""
    # Few rows at a time: torch makes a float64 copy of what it is given.
    parts = [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
        for part in grads.split(ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def clipped_sum_(grads: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i with g̃ clipped to C, shape (D,) in float64. Sensitivity C.

    A sum in float32 rounds anew with every sample more, and samples that are alike
    round alike: at n = 6,000 that moved it by 9e-4 C.
    """
    factors = clipping_factors_(grads, max_norm)
    return torch.cat([factors @ part for _, part in _in_float64(grads)])


def second_moment_(grads: Tensor, basis: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i [g̃_iᵀ U, C], shape (D, K + 1) in float64. Sensitivity √2 C².

    The last column is C times the clipped sum, which centring needs: centring the
    samples themselves would cost a sensitivity of 4 C².
    """
    factors = clipping_factors_(grads, max_norm)
    # Clipped first: a product with a sample that is nearly too large to store is
    # infinite, and no factor brings it back.
    coefficients = grads.new_zeros((len(grads), basis.shape[1]), dtype=torch.float64)
    for columns, part in _in_float64(grads):
        coefficients += (factors[:, None] * part) @ basis[columns].double()
    ones = torch.ones_like(factors)[:, None]
    right = factors[:, None] * torch.cat([coefficients, max_norm * ones], dim=1)
    return torch.cat([part.T @ right for _, part in _in_float64(grads)])


def _in_float64(grads: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the samples after the other, in float64."""
    step = max(1, ENTRIES_AT_ONCE // max(len(grads), 1))
    for start in range(0, grads.shape[1], step):
        columns = slice(start, start + step)
        yield columns, grads[:, columns].double()
