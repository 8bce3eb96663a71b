"""Directions that are stored parameter by parameter, as thin products or as columns.

Shapes: K directions, r their rank in a weight (n, m). Direction j is P_j Q_jᵀ there,
P_j (n, r) and Q_j (m, r), kept side by side: P (n, K r) and Q (m, K r). So products
with all directions are single products with P or Q. A parameter with min(n, m) ≤ r, as
biases and norms are, keeps its columns U (n m, K), which take no more room.

Both kinds can be replaced by the combination U C + Gᵀ M of directions and samples, of
which a thin one keeps the part that one step of a power iteration finds:

    P ← orth(Y_j Q_j),   Q ← Y_jᵀ P,   Y_j = Σ_i C_ij P_i Q_iᵀ + Σ_b M_bj G_b

(Vogels et al., PowerSGD, 2019). Y_j is never formed, except where samples are rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dome.numerics.factors import Product, Use


def is_thin(shape: Sequence[int], rank: int) -> bool:
    """Whether directions of rank r take less as thin products in a parameter."""
    return len(shape) > 1 and min(shape[0], prod(shape[1:])) > rank


@dataclass(frozen=True, slots=True)
class Columns:
    """K directions of a parameter as they are.

    Attributes:
        U: Shape (n, K).
    """

    U: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {"columns": self.U}

    def coordinates(
        self, uses: Iterable[Use], out: Tensor, kept: dict[int, Tensor]
    ) -> None:
        """Add G U to ``out`` (B, K)."""
        del kept
        for use in uses:
            out[use.samples] += self._rows(use) @ self.U

    def combination(self, M: Tensor, uses: Iterable[Use]) -> Tensor:
        """Gᵀ M of M (B, K), shape (n, K)."""
        total = torch.zeros_like(self.U)
        for use in uses:
            total += self._rows(use).T @ M[use.samples]
        return total

    def gram(self, other: "Columns") -> Tensor:
        """Uᵀ W of other columns W, shape (K, K)."""
        return self.U.T @ other.U

    def dot(self, gradient: Tensor) -> Tensor:
        """Uᵀ g, shape (K,)."""
        return gradient.flatten() @ self.U

    def remove_(self, gradient: Tensor, c: Tensor) -> None:
        """Subtract U c from a gradient."""
        gradient.sub_((self.U @ c).view_as(gradient))

    def scaled(self, factors: Tensor) -> "Columns":
        """Each direction times a number."""
        return Columns(self.U * factors.to(self.U.dtype))

    def written_out(self) -> Tensor:
        """Shape (n, K)."""
        return self.U

    def _rows(self, use: Use) -> Tensor:
        grads = use.grads
        grads = grads.rows() if isinstance(grads, Product) else grads
        return grads.flatten(1).to(self.U.dtype)


@dataclass(frozen=True, slots=True)
class Thin:
    """K directions of a weight matrix (n, m), each of rank r.

    Attributes:
        P: Shape (n, K r).
        Q: Shape (m, K r).
        num: K.
    """

    P: Tensor
    Q: Tensor
    num: int

    @property
    def rank(self) -> int:
        """r."""
        return self.P.shape[1] // self.num

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {"left": self.P, "right": self.Q}

    def coordinates(
        self, uses: Iterable[Use], out: Tensor, kept: dict[int, Tensor]
    ) -> None:
        """Add G U to ``out`` (B, K); right products are kept, by the use's identity.

        V_bj = Σ_t (l_tᵀ P_j)(Q_jᵀ r_t)
        """
        for use in uses:
            if isinstance(use.grads, Product):
                rQ = use.grads.right.times(self.Q)
                both = (use.grads.left.times(self.P) * rQ).sum(1)
                out[use.samples] += both.unflatten(1, (self.num, -1)).sum(2)
                kept[id(use)] = rQ
            else:
                rows = use.grads.flatten(1).to(self.P.dtype)
                out[use.samples] += rows @ self.written_out()

    def of_rows(self, M: Tensor, uses: Iterable[Use]) -> Tensor | None:
        """Σ_b M_bj G_b of samples that are rows, shape (K, n, m); None without any."""
        total: Tensor | None = None
        for use in uses:
            if not isinstance(use.grads, Product):
                rows = use.grads.flatten(1).to(self.P.dtype)
                some = M[use.samples].T @ rows
                total = some if total is None else total.add_(some)
        shape = self.num, len(self.P), len(self.Q)
        return None if total is None else total.view(shape)

    def left_products(
        self, M: Tensor, uses: Iterable[Use], kept: dict[int, Tensor], W: Tensor | None
    ) -> Tensor:
        """Σ_b M_bj G_b Q_j for all j, shape (n, K r)."""
        total = torch.zeros_like(self.P)
        for use in uses:
            if isinstance(use.grads, Product):
                weighted = self._weighted(kept.pop(id(use)), M[use.samples])
                total += use.grads.left.transposed_times(weighted)
        if W is not None:
            total += _side_by_side(W @ _apart(self.Q, self.num))
        return total

    def right_products(
        self, P: Tensor, M: Tensor, uses: Iterable[Use], W: Tensor | None
    ) -> Tensor:
        """Σ_b M_bj G_bᵀ P_j for all j, shape (m, K r)."""
        total = torch.zeros_like(self.Q)
        for use in uses:
            if isinstance(use.grads, Product):
                weighted = self._weighted(use.grads.left.times(P), M[use.samples])
                total += use.grads.right.transposed_times(weighted)
        if W is not None:
            total += _side_by_side(W.mT @ _apart(P, self.num))
        return total

    def past_left(self, C: Tensor) -> Tensor:
        """Σ_i C_ij P_i Q_iᵀ Q_j for all j, shape (n, K r)."""
        return self.P @ (self.Q.T @ self.Q * self._spread(C))

    def past_right(self, C: Tensor, P: Tensor) -> Tensor:
        """Σ_i C_ij Q_i P_iᵀ P'_j for all j, shape (m, K r)."""
        return self.Q @ (self.P.T @ P * self._spread(C))

    def gram(self, other: "Thin") -> Tensor:
        """u_iᵀ w_j = tr (P_iᵀ P'_j)(Q'_jᵀ Q_i) of other directions w, shape (K, K)."""
        both = (self.P.T @ other.P) * (self.Q.T @ other.Q)
        return both.view(self.num, self.rank, self.num, self.rank).sum((1, 3))

    def dot(self, gradient: Tensor) -> Tensor:
        """tr P_jᵀ g Q_j, shape (K,)."""
        g = gradient.flatten(1)
        return ((g @ self.Q) * self.P).sum(0).view(self.num, -1).sum(1)

    def remove_(self, gradient: Tensor, c: Tensor) -> None:
        """Subtract Σ_j c_j P_j Q_jᵀ from a gradient."""
        weights = c.repeat_interleave(self.rank)
        if gradient.is_contiguous():
            gradient.flatten(1).addmm_(self.P * weights, self.Q.T, alpha=-1)
        else:
            gradient.sub_(((self.P * weights) @ self.Q.T).view_as(gradient))

    def scaled(self, factors: Tensor) -> "Thin":
        """Each direction times a number."""
        wide = factors.to(self.Q.dtype).repeat_interleave(self.rank)
        return Thin(self.P, self.Q * wide, self.num)

    def written_out(self) -> Tensor:
        """Shape (n m, K)."""
        P, Q = _apart(self.P, self.num), _apart(self.Q, self.num)
        return (P @ Q.mT).flatten(1).T

    def _weighted(self, products: Tensor, M: Tensor) -> Tensor:
        """Products (B, T, K r) of each sample times its M_bj."""
        return products * M.repeat_interleave(self.rank, dim=1).unsqueeze(1)

    def _spread(self, C: Tensor) -> Tensor:
        """C (K, K) as a matrix (K r, K r)."""
        return C.repeat_interleave(self.rank, 0).repeat_interleave(self.rank, 1)


def own_grams(X: Tensor, num: int) -> Tensor:
    """X_jᵀ X_j of the X_j (n, r) that lie side by side in X (n, K r), (K, r, r)."""
    apart = _apart(X, num)
    return (apart.mT @ apart).double()


def orthonormal_turns(grams: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """What makes columns with these Gram matrices (..., r, r) orthonormal.

    Args:
        grams: In float64.
        floor: Least eigenvalue, after columns were given one length, of a direction.

    Returns:
        Matrices (..., r, r), zero in the first columns where there are fewer than r
        directions, and how many such columns there are in all.
    """
    squares = grams.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt()
    unit = grams / lengths.unsqueeze(-2) / lengths.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(unit)
    counts = values > floor
    roots = torch.where(counts, values, torch.inf).rsqrt()
    turns = vectors * roots.unsqueeze(-2) / lengths.unsqueeze(-1)
    return turns, (~counts).sum()


def turned(X: Tensor, turns: Tensor) -> Tensor:
    """Each X_j times its own matrix (K, r, r), side by side, shape (n, K r)."""
    return _side_by_side(_apart(X, len(turns)) @ turns.to(X.dtype))


def filled(P: Tensor, num: int, floor: float, generator: torch.Generator) -> Tensor:
    """Orthonormal P_j with random directions in place of zero columns.

    They are not in Y_j, so that nothing is lost; and Y_jᵀ P finds what Y_j has there
    once it has more directions than it had.
    """
    noise = torch.randn(
        P.shape, generator=generator, dtype=P.dtype, device=P.device
    ) * (P == 0).all(0)
    apart, noise = _apart(P, num), _apart(noise, num)
    for _ in range(2):  # the second sweep removes what rounding left of the first
        noise = noise - apart @ (apart.mT @ noise)
    turns, _ = orthonormal_turns((noise.mT @ noise).double(), floor)
    # Columns without a direction come first in both.
    return P + _side_by_side(noise @ turns.flip(-1).to(P.dtype))


def _apart(stack: Tensor, num: int) -> Tensor:
    """(n, K r) as (K, n, r)."""
    return stack.unflatten(1, (num, -1)).movedim(1, 0)


def _side_by_side(apart: Tensor) -> Tensor:
    """(K, n, r) as (n, K r)."""
    return apart.movedim(0, 1).flatten(1)
