"""What a step tells about its samples, before the noise, with its sensitivity.

Shapes: G (B, D) samples, U (D, K) a basis that none of these samples has turned, C the
clipping norm. Sensitivity: how far a sum moves, in Euclidean (Frobenius) norm, when one
sample joins the batch or leaves it. docs/privacy.md has the derivations.
"""

import math

import torch
from torch import Tensor

MOMENT_SENSITIVITY = math.sqrt(2)  # of ``second_moment_``, in units of C²
# Rounding of a norm and of a scaled row must not carry it beyond C.
SAFETY = 1e-6
ROWS_AT_ONCE = 4


def without_span_(grads: Tensor, basis: Tensor) -> None:
    """G ← G − G U Uᵀ, row by row: what is clipped is what is formed here.

    A norm from ‖g‖² − ‖Uᵀ g‖² would be cheaper, and wrong by rounding exactly where
    nearly all of a sample is removed, so that clipping would not bound it.
    """
    grads.addmm_(grads @ basis, basis.T, alpha=-1)


def clipping_factors_(grads: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖g_i‖) for every row, shape (B,); rows that are not finite are zeroed.

    A sample that is not finite contributes nothing, as if its gradient were zero: one
    bad sample must not decide what is released.
    """
    norms = row_norms(grads)
    bad = norms.isfinite().logical_not()
    grads[bad] = 0.0
    limit = max_norm * (1 - SAFETY)
    return torch.where(bad, 0.0, (limit / norms).clamp(max=1.0)).to(grads.dtype)


def row_norms(grads: Tensor) -> Tensor:
    """‖g_i‖ of every row, shape (B,), in float64: a norm too small would clip less."""
    # Few rows at a time: torch makes a float64 copy of what it is given.
    parts = [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
        for part in grads.split(ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def clipped_sum_(grads: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i with g̃ clipped to C, shape (D,). Sensitivity C."""
    return clipping_factors_(grads, max_norm) @ grads


def second_moment_(grads: Tensor, basis: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i [g̃_iᵀ U, C], shape (D, K + 1). Sensitivity √2 C².

    The last column is C times the clipped sum, which centring needs: centring the
    samples themselves would cost a sensitivity of 4 C².
    """
    # Clipped first: a product with a sample that is nearly too large to store is
    # infinite, and no factor brings it back.
    clipped = clipping_factors_(grads, max_norm)[:, None] * grads
    ones = torch.ones_like(clipped[:, :1])
    return clipped.T @ torch.cat([clipped @ basis, max_norm * ones], dim=1)
