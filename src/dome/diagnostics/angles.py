"""How two subspaces lie to each other, from bases of them.

Shapes: V (D, K), W (D, L), orthonormal columns; L and K may differ. A direction that a
tracker has not found yet is a column of zeros, and is at a right angle to everything.
"""

import torch
from torch import Tensor

from dome.torch_private import own_arithmetic
from dome.trackers.linalg import block_rows, compute_dtype, product


@own_arithmetic
def principal_angles(V: Tensor, W: Tensor) -> Tensor:
    """Principal angles between two subspaces, in radians, smallest first.

        cos θᵢ = σᵢ(VᵀW),  sin θᵢ = σ(W − V VᵀW)

    Each angle is taken from the form that is exact for it: the cosine of a small angle
    loses half of the digits, as the sine of a large one does (Björck and Golub, 1973).
    O(D K L) flops, and no third tall matrix.

    Args:
        V: Orthonormal basis of the first subspace, shape (D, K).
        W: Orthonormal basis of the second subspace, shape (D, L).

    Returns:
        Shape (min(K, L),), float64, in [0, π/2].

    Example:
        >>> e = torch.eye(3)
        >>> principal_angles(e[:, :2], e[:, 1:]).round(decimals=4).tolist()[1]
        1.5708
    """
    V, W = _wide_first(V, W)
    C = product(W.T, V)
    cosines = torch.linalg.svdvals(C).clamp(max=1.0)
    squares = torch.linalg.eigvalsh(_outside(V, W, C)).clamp(0.0, 1.0)
    return torch.where(
        cosines.square() < 0.5, cosines.arccos(), squares.sqrt().arcsin()
    )


@own_arithmetic
def subspace_overlap(V: Tensor, W: Tensor) -> float:
    """How much of the smaller of two subspaces lies in the other, in [0, 1].

        ‖VᵀW‖²_F / min(K, L)

    The mean of the squared cosines of the principal angles: 1 if one subspace holds the
    other, max(K, L)/D on average if one of them is random.

    Args:
        V: Orthonormal basis of the first subspace, shape (D, K).
        W: Orthonormal basis of the second subspace, shape (D, L).

    Example:
        >>> e = torch.eye(3)
        >>> subspace_overlap(e[:, :2], e[:, 1:])
        0.5
    """
    V, W = _wide_first(V, W)
    return float(product(W.T, V).square().sum() / W.shape[1])


def _wide_first(V: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    for basis in (V, W):
        if basis.dim() != 2 or basis.shape[1] == 0:
            raise ValueError(
                "a basis must have shape (D, K), one direction per column, got "
                f"{tuple(basis.shape)}"
            )
    if len(V) != len(W):
        raise ValueError(
            f"bases of {len(V)} and {len(W)} rows: compare subspaces of the same "
            f"parameters"
        )
    return (V, W) if V.shape[1] >= W.shape[1] else (W, V)


def _outside(V: Tensor, W: Tensor, C: Tensor) -> Tensor:
    """RᵀR of R = W − V Cᵀ, formed explicitly block by block, shape (L, L)."""
    total, dtype = C.new_zeros(len(C), len(C)), compute_dtype(V.dtype)
    C = C.to(dtype)
    num = block_rows(V.shape[1] + W.shape[1], V.device)
    for v, w in zip(V.split(num), W.split(num), strict=True):
        residual = torch.addmm(w.to(dtype), v.to(dtype), C.T, alpha=-1)
        total += residual.T @ residual
    return total
