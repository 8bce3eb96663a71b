"""Directions of one weight matrix, as products of two thin matrices.

Shapes: K directions of rank r in a weight (n, m). Direction j is P_j Q_jᵀ, P_j (n, r)
and Q_j (m, r), kept side by side: P (n, K r) and Q (m, K r). So products with all
directions are single products with P or Q.

They can be replaced by the combination Y = U C + Gᵀ M of directions and samples, of
which each column keeps what one step of a power iteration finds:

    P ← orth(Y_j Q_j),   Q ← Y_jᵀ P,   Y_j = Σ_i C_ij P_i Q_iᵀ + Σ_b M_bj G_b

(Vogels et al., PowerSGD, 2019). Y_j is formed only where samples are rows of small
weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dome.numerics.factors import Product, Use
from dome.numerics.orthonormal import inverse_cholesky
from dome.numerics.passes import sum_of_pieces
from dome.numerics.shard import Total
from dome.numerics.together import IsTrue, looked_up

# A weight with more numbers is never made into rows: 256 kB a sample in float32.
SMALL_WEIGHT = 1 << 16
# Columns of a weight from which K combinations of samples are made row by row of it: on
# a CPU half the time of one product (10, 128) x (128, 36864), 3.8 against 7.1 ms.
LONG_ROW = 128


def is_thin(shape: Sequence[int], rank: int) -> bool:
    """Whether directions of rank r take less as thin products in a parameter."""
    return len(shape) > 1 and min(shape[0], prod(shape[1:])) > rank


@dataclass(frozen=True, slots=True)
class Spread:
    """What all weights need of C (K, K) and M (B, K), made once.

    Attributes:
        C: As a matrix (K r, K r).
        M: As a matrix (B, K r).
        narrow: C and M as they are.
    """

    C: Tensor
    M: Tensor
    narrow: tuple[Tensor, Tensor]

    @staticmethod
    def of(C: Tensor, M: Tensor, rank: int) -> "Spread":
        """For directions of a rank."""
        wide = C.repeat_interleave(rank, 0).repeat_interleave(rank, 1)
        return Spread(wide, M.repeat_interleave(rank, 1), (C, M))


@dataclass(slots=True)
class Kept:
    """What products of one weight leave for those that follow in the same update.

    Attributes:
        right: X Q of every use that is a product, in order.
        written: The directions (K, n m), where a use is rows.
        Y: Gᵀ M of the samples that are rows: (n, K, m), or (1, K, n m) of short rows.
        has_past: Whether U C is in Y too.
    """

    right: list[Tensor] = field(default_factory=list)
    written: Tensor | None = None
    Y: Tensor | None = None
    has_past: bool = False


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

    def coordinates(self, uses: Sequence[Use], out: Tensor) -> Kept:
        """Add G U to ``out`` (B, K).

        V_bj = Σ_t (l_tᵀ P_j)(Q_jᵀ r_t)
        """
        kept = Kept()
        for use in uses:
            grads = use.grads
            if isinstance(grads, Product):
                rQ = grads.right.times(self.Q)
                both = (grads.left.times(self.P) * rQ).sum(1)
                part = out[use.samples]
                part += both.view(len(both), self.num, -1).sum(2)
                kept.right.append(rQ)
            else:
                if kept.written is None:
                    kept.written = self.written_out()
                part = out[use.samples]
                part += sum_of_pieces(kept.written, self._rows(grads).T).T
        return kept

    def left_products(
        self, uses: Sequence[Use], kept: Kept, spread: Spread, with_past: bool
    ) -> Tensor:
        """Σ_b M_bj G_b Q_j for all j, shape (n, K r).

        The past is left out, except ``with_past`` where samples are rows: there it is
        added to Y, which then has it for the right products too.
        """
        total: Tensor | None = None
        C, M = spread.narrow
        for use in uses:
            grads = use.grads
            if isinstance(grads, Product):
                weights = spread.M[use.samples].unsqueeze(1)
                some = grads.left.transposed_times(kept.right.pop(0) * weights)
                total = some if total is None else total.add_(some)
            else:
                kept.Y = self._combined(M[use.samples], self._rows(grads), kept.Y)
        if kept.Y is not None:
            if with_past and kept.written is not None:
                kept.Y = self._combined(C, kept.written, kept.Y)
                kept.has_past = True
            some = _products(self._matrices(kept.Y).mT, _apart(self.Q, self.num))
            total = some if total is None else total.add_(some)
        return torch.zeros_like(self.P) if total is None else total

    def right_products(
        self, P: Tensor, uses: Sequence[Use], kept: Kept, spread: Spread
    ) -> Tensor:
        """Σ_b M_bj G_bᵀ P_j for all j, shape (m, K r): see ``left_products``."""
        total: Tensor | None = None
        for use in uses:
            if isinstance(use.grads, Product):
                left, right = use.grads.left, use.grads.right
                weights = spread.M[use.samples].unsqueeze(1)
                some = right.transposed_times(left.times(P) * weights)
                total = some if total is None else total.add_(some)
        if kept.Y is not None:
            some = _products(self._matrices(kept.Y), _apart(P, self.num))
            total = some if total is None else total.add_(some)
        return torch.zeros_like(self.Q) if total is None else total

    def past_left(self, spread: Spread) -> Tensor:
        """Σ_i C_ij P_i Q_iᵀ Q_j for all j, shape (n, K r)."""
        return self.P @ (self.Q.T @ self.Q).mul_(spread.C)

    def past_right(self, P: Tensor, spread: Spread) -> Tensor:
        """Σ_i C_ij Q_i P_iᵀ P'_j for all j, shape (m, K r)."""
        return self.Q @ (self.P.T @ P).mul_(spread.C)

    def gram(self, other: "Thin") -> Tensor:
        """u_iᵀ w_j = tr (P_iᵀ P'_j)(Q'_jᵀ Q_i) of other directions w, shape (K, K)."""
        both = (self.P.T @ other.P).mul_(self.Q.T @ other.Q)
        return both.view(self.num, self.rank, self.num, self.rank).sum((1, 3))

    def dot(self, gradient: Tensor) -> Tensor:
        """tr P_jᵀ g Q_j, shape (K,)."""
        products = gradient.flatten(1) @ self.Q
        return products.mul_(self.P).sum(0).view(self.num, -1).sum(1)

    def remove_(self, gradient: Tensor, wide: Tensor) -> None:
        """Subtract Σ_j c_j P_j Q_jᵀ from a gradient, of c each r times (K r,)."""
        if gradient.is_contiguous():
            gradient.flatten(1).addmm_(self.P * wide, self.Q.T, alpha=-1)
        else:
            gradient.sub_(((self.P * wide) @ self.Q.T).view_as(gradient))

    def written_out(self) -> Tensor:
        """Shape (K, n m)."""
        P, Q = _apart(self.P, self.num), _apart(self.Q, self.num)
        return (P @ Q.mT).flatten(1)

    def _rows(self, grads: Tensor) -> Tensor:
        return grads.flatten(1).to(self.P.dtype)

    def _combined(self, weights: Tensor, rows: Tensor, Y: Tensor | None) -> Tensor:
        """Y + rowsᵀ weights of rows (b, n m) and weights (b, K), as ``Kept`` has it."""
        # At least one: of a short weight a worker may hold no row.
        num = max(len(self.P), 1) if len(self.Q) >= LONG_ROW else 1
        pieces = rows.unflatten(1, (num, -1)).transpose(0, 1)
        weights = weights.T.expand(num, -1, -1)
        return torch.bmm(weights, pieces) if Y is None else Y.baddbmm_(weights, pieces)

    def _matrices(self, Y: Tensor) -> Tensor:
        return Y.transpose(0, 1).view(self.num, len(self.P), len(self.Q))


def orthonormal_turns(
    grams: Tensor, floor: float, is_true: IsTrue = looked_up
) -> tuple[Tensor, bool]:
    """What makes columns with these Gram matrices (..., r, r) orthonormal.

    Args:
        grams: In float64.
        floor: Least share of itself, squared, that a column must have of its own.
        is_true: What to believe of there being r directions in each.

    Returns:
        Matrices (..., r, r), zero in the first columns where there are fewer than r
        directions, and whether there are such columns.
    """
    turns, own = inverse_cholesky(grams)
    if is_true((own > floor).all()):
        return turns, False
    squares = grams.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt()
    unit = grams / lengths.unsqueeze(-2) / lengths.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(unit)
    counts = values > floor
    roots = torch.where(counts, values, torch.inf).rsqrt()
    turns = vectors * roots.unsqueeze(-2) / lengths.unsqueeze(-1)
    return turns, bool((~counts).any())


class Cut(NamedTuple):
    """What is held here of one parameter, which workers cut along its first dimension.

    Attributes:
        columns: Its numbers, among all that are held.
        rows: Its rows, among all that it has.
        num_rows: How many these are.
    """

    columns: slice
    rows: slice
    num_rows: int


def orthonormal(
    stacks: Sequence[Tensor],
    num: int,
    floor: float,
    seed: int,
    is_true: IsTrue,
    cuts: Sequence[Cut],
    total: Total,
) -> list[Tensor]:
    """Orthonormal columns with the span of each X_j of each weight.

    Args:
        stacks: For each weight, the X_j (n, r) side by side, shape (n, K r).
        num: K.
        floor: See ``orthonormal_turns``.
        seed: Of the random directions that fill up an X_j with fewer than r. They are
            not in Y_j, so that nothing is lost, and Y_jᵀ P finds what Y_j has there
            once it has more directions than it had.
        is_true: See ``orthonormal_turns``.
        cuts: Of each weight, which of the n rows are held here.
        total: Adds up tensors over workers that hold the others.
    """
    if not stacks:
        return []
    aparts = [_apart(X, num) for X in stacks]
    grams = torch.stack([apart.mT @ apart for apart in aparts]).double()
    (grams,) = total(grams)
    grams = grams.nan_to_num_(0.0, 0.0, 0.0)
    turns, has_open = orthonormal_turns(grams, floor, is_true)
    turns = turns.to(stacks[0].dtype)
    found = [
        _side_by_side(apart @ turn) for apart, turn in zip(aparts, turns, strict=True)
    ]
    if not has_open:
        return found
    generator = torch.Generator(stacks[0].device).manual_seed(seed)
    are_open = (turns == 0).all(-2).flatten(1)
    for i, is_any in enumerate(are_open.any(1).tolist()):
        if is_any:
            P, cut = found[i], cuts[i]
            noise = torch.randn(
                (cut.num_rows, P.shape[1]),
                generator=generator,
                dtype=P.dtype,
                device=P.device,
            )
            noise = noise[cut.rows] * are_open[i]
            found[i] = _filled(P, noise, num, floor, total)
    return found


def _filled(P: Tensor, noise: Tensor, num: int, floor: float, total: Total) -> Tensor:
    """Orthonormal P_j with what is random in the place of columns that are zero."""
    apart, noise = _apart(P, num), _apart(noise, num)
    for _ in range(2):  # the second sweep removes what rounding left of the first
        (inside,) = total(apart.mT @ noise)
        noise = noise - apart @ inside
    (grams,) = total((noise.mT @ noise).double())
    turns, _ = orthonormal_turns(grams, floor)
    # Columns without a direction come first in both.
    return P + _side_by_side(noise @ turns.flip(-1).to(P.dtype))


def _products(Y: Tensor, X: Tensor) -> Tensor:
    """Y_jᵀ X_j of Y (K, n, m) and thin X (K, n, r), side by side, shape (m, K r)."""
    # As (X_jᵀ Y_j)ᵀ it takes a fifth of the time on a CPU: 76 against 426 µs, 64 x 576.
    return torch.bmm(X.mT, Y).permute(2, 0, 1).flatten(1)


def _apart(stack: Tensor, num: int) -> Tensor:
    """(n, K r) as (K, n, r)."""
    return stack.unflatten(1, (num, -1)).transpose(0, 1)


def _side_by_side(apart: Tensor) -> Tensor:
    """(K, n, r) as (n, K r)."""
    return apart.transpose(0, 1).flatten(1)
