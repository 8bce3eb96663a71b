"""Directions of one weight matrix, as products of two thin matrices.

Shapes: K directions of rank r in a weight (n, m). Direction j is P_j Q_jᵀ, P_j (n, r)
and Q_j (m, r). They are kept transposed and one below the other, P (K, r, n) and
Q (K, r, m): as (K r, n) and (K r, m) they are one factor of products with all
directions, as batches of K what is done to each, both without a copy.

They can be replaced by the combination Y = U C + Gᵀ M of directions and samples, of
which each column keeps what one step of a power iteration finds:

    P ← orth(Y_j Q_j),   Q ← Y_jᵀ P,   Y_j = Σ_i C_ij P_i Q_iᵀ + Σ_b M_bj G_b

(Vogels et al., PowerSGD, 2019). Y_j is formed only where samples are rows of small
weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dome.trackers.factors import Product, Use
from dome.trackers.linalg import IsTrue, Total, inverse_cholesky, product

# A weight with more numbers is never made into rows: 256 kB a sample in float32.
SMALL_WEIGHT = 1 << 16
# Columns of a weight from which K combinations of samples are made row by row of it: on
# a CPU half the time of one product (10, 128) x (128, 36864), 3.8 against 7.1 ms.
LONG_ROW = 128


# Numbers of a weight that is kept whole beside larger ones, and its share of them all:
# as thin products it would save next to nothing, and cost the time of a large one.
# ResNet-8's six smallest weights, a tenth of its numbers, took 4 % of a step at B = 16.
WHOLE_WEIGHT = 1 << 12
WHOLE_SHARE = 20


def can_be_thin(shape: Sequence[int], rank: int) -> bool:
    """Whether directions of rank r take less as thin products in a parameter."""
    return len(shape) > 1 and min(shape[0], prod(shape[1:])) > rank


def is_thin(shape: Sequence[int], rank: int, dim: int) -> bool:
    """Whether they are kept as such, in a parameter among D numbers."""
    num = prod(shape)
    is_whole = num <= WHOLE_WEIGHT and num * WHOLE_SHARE <= dim
    return can_be_thin(shape, rank) and not is_whole


@dataclass(frozen=True)
class Spread:
    """What weights need of C (K, K) and M (B, K), made once, and where it is needed.

    Attributes:
        narrow: C and M as they are.
        rank: r.
    """

    narrow: tuple[Tensor, Tensor]
    rank: int

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """C as a matrix (K r, K r) and M as a matrix (B, K r)."""
        (C, M), r = self.narrow, self.rank
        C = C.repeat_interleave(r, 0).repeat_interleave(r, 1)
        return C, M.repeat_interleave(r, 1)


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


@dataclass(frozen=True)
class Thin:
    """K directions of a weight matrix (n, m), each of rank r.

    Attributes:
        P: Shape (K, r, n).
        Q: Shape (K, r, m).
    """

    P: Tensor
    Q: Tensor

    @staticmethod
    def of_columns(P: Tensor, Q: Tensor, num: int) -> "Thin":
        """From factors side by side, (n, K r) and (m, K r), as states have them."""
        return Thin(_one_by_one(P, num).contiguous(), _one_by_one(Q, num).contiguous())

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        """The factors side by side, (n, K r) and (m, K r), each a copy."""
        P, Q = self._sides
        return P.T.contiguous(), Q.T.contiguous()

    @property
    def num(self) -> int:
        """K."""
        return self.P.shape[0]

    @cached_property
    def _sides(self) -> tuple[Tensor, Tensor]:
        """P as (K r, n) and Q as (K r, m)."""
        return self.P.flatten(0, 1), self.Q.flatten(0, 1)

    def coordinates(self, uses: Sequence[Use], out: Tensor) -> Kept:
        """Add G U to ``out`` (B, K).

        V_bj = Σ_t (l_tᵀ P_j)(Q_jᵀ r_t)
        """
        kept = Kept()
        for use in uses:
            grads, part = use.grads, out[use.samples]
            if isinstance(grads, Product):
                P, Q = self._sides
                rQ = grads.right.times(Q.T)
                both = (grads.left.times(P.T) * rQ).sum(1)
                part += both.view(len(both), self.num, -1).sum(2)
                kept.right.append(rQ)
            else:
                if kept.written is None:
                    kept.written = self.written_out()
                part += product(kept.written, self._rows(grads).T).T
        return kept

    def left_products(
        self, uses: Sequence[Use], kept: Kept, spread: Spread, with_past: bool
    ) -> Tensor:
        """(Σ_b M_bj G_b Q_j)ᵀ for all j, shape (K, r, n).

        The past is left out, except ``with_past`` where samples are rows: there it is
        added to Y, which then has it for the right products too.
        """
        total: Tensor | None = None
        C, M = spread.narrow
        for use in uses:
            grads = use.grads
            if isinstance(grads, Product):
                weights = spread.wide[1][use.samples].unsqueeze(1)
                some = grads.left.transposed_times(kept.right.pop(0) * weights)
                total = some if total is None else total.add_(some)
            else:
                kept.Y = self._combined(M[use.samples], self._rows(grads), kept.Y)
        found = None if total is None else _one_by_one(total, self.num)
        if kept.Y is not None:
            if with_past and kept.written is not None:
                kept.Y = self._combined(C, kept.written, kept.Y)
                kept.has_past = True
            some = torch.bmm(self.Q, self._matrices(kept.Y).mT)
            found = some if found is None else some.add_(found)
        return torch.zeros_like(self.P) if found is None else found

    def right_products(
        self, P: Tensor, uses: Sequence[Use], kept: Kept, spread: Spread
    ) -> Tensor:
        """(Σ_b M_bj G_bᵀ P_j)ᵀ for all j, shape (K, r, m): see ``left_products``.

        Args:
            P: The new left factors, shape (K, r, n).
            uses: The samples.
            kept: What the products before left of them.
            spread: C and M.
        """
        total: Tensor | None = None
        for use in uses:
            if isinstance(use.grads, Product):
                left, right = use.grads.left, use.grads.right
                weights = spread.wide[1][use.samples].unsqueeze(1)
                lP = left.times(P.flatten(0, 1).T)
                some = right.transposed_times(lP * weights)
                total = some if total is None else total.add_(some)
        found = None if total is None else _one_by_one(total, self.num)
        if kept.Y is not None:
            some = torch.bmm(P, self._matrices(kept.Y))
            found = some if found is None else some.add_(found)
        return torch.zeros_like(self.Q) if found is None else found

    def past_left(self, spread: Spread) -> Tensor:
        """(Σ_i C_ij P_i Q_iᵀ Q_j)ᵀ for all j, shape (K, r, n)."""
        P, Q = self._sides
        return ((Q @ Q.T).mul_(spread.wide[0].T) @ P).view_as(self.P)

    def past_right(self, P: Tensor, spread: Spread) -> Tensor:
        """(Σ_i C_ij Q_i P_iᵀ P'_j)ᵀ for all j, shape (K, r, m)."""
        old, Q = self._sides
        return ((P.flatten(0, 1) @ old.T).mul_(spread.wide[0].T) @ Q).view_as(self.Q)

    def overlaps(self, other: "Thin") -> Tensor:
        """What adds up to u_iᵀ w_j of other directions w, shape (K r, K r).

        u_iᵀ w_j = tr (P_iᵀ P'_j)(Q'_jᵀ Q_i) are the sums of its blocks (r, r).
        """
        (P, Q), (P_other, Q_other) = self._sides, other._sides
        return (P @ P_other.T).mul_(Q @ Q_other.T)

    def dot(self, gradient: Tensor) -> Tensor:
        """tr P_jᵀ g Q_j, shape (K,)."""
        P, Q = self._sides
        return (Q @ gradient.flatten(1).T).mul_(P).view(self.num, -1).sum(1)

    def remove_(self, gradient: Tensor, c: Tensor) -> None:
        """Subtract Σ_j c_j P_j Q_jᵀ from a gradient, of c (K, 1, 1)."""
        P, Q = (self.P * c).flatten(0, 1).T, self._sides[1]
        if gradient.is_contiguous():
            gradient.flatten(1).addmm_(P, Q, alpha=-1)
        else:
            gradient.sub_((P @ Q).view_as(gradient))

    def written_out(self) -> Tensor:
        """Shape (K, n m)."""
        return torch.bmm(self.P.mT, self.Q).flatten(1)

    def _rows(self, grads: Tensor) -> Tensor:
        return grads.flatten(1).to(self.P.dtype)

    def _combined(self, weights: Tensor, rows: Tensor, Y: Tensor | None) -> Tensor:
        """Y + rowsᵀ weights of rows (b, n m) and weights (b, K), as ``Kept`` has it."""
        n, m = self.P.shape[2], self.Q.shape[2]
        # At least one: of a short weight a worker may hold no row.
        num = max(n, 1) if m >= LONG_ROW else 1
        pieces = rows.view(rows.shape[0], num, n * m // num).transpose(0, 1)
        weights = weights.T.expand(num, -1, -1)
        return torch.bmm(weights, pieces) if Y is None else Y.baddbmm_(weights, pieces)

    def _matrices(self, Y: Tensor) -> Tensor:
        """Y_j of all j, shape (K, n, m)."""
        return Y.transpose(0, 1).view(self.num, self.P.shape[2], self.Q.shape[2])


def orthonormal_turns(
    grams: Tensor, floor: float, is_true: IsTrue = bool
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
    stacks: list[Tensor],
    floor: float,
    seed: int,
    is_true: IsTrue,
    cuts: Sequence[Cut],
    total: Total,
) -> list[Tensor]:
    """Orthonormal columns with the span of each X_j of each weight, transposed.

    Args:
        stacks: For each weight, the X_jᵀ, shape (K, r, n). The list is emptied.
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
    grams = torch.stack([torch.bmm(X, X.mT) for X in stacks]).double()
    (grams,) = total(grams)
    grams = grams.nan_to_num_(0.0, 0.0, 0.0)
    turns, has_open = orthonormal_turns(grams, floor, is_true)
    turns = turns.mT.to(stacks[0].dtype)
    found = [torch.bmm(turn, X) for turn, X in zip(turns, used_up(stacks), strict=True)]
    if not has_open:
        return found
    generator = torch.Generator(found[0].device).manual_seed(seed)
    are_open = (turns == 0).all(-1)
    for i, is_any in enumerate(are_open.flatten(1).any(1).tolist()):
        if is_any:
            P, cut = found[i], cuts[i]
            noise = torch.randn(
                (cut.num_rows, P.shape[0] * P.shape[1]),
                generator=generator,
                dtype=P.dtype,
                device=P.device,
            )
            noise = _one_by_one(noise[cut.rows], len(P)) * are_open[i].unsqueeze(-1)
            found[i] = _filled(P, noise, floor, total)
    return found


def _filled(P: Tensor, noise: Tensor, floor: float, total: Total) -> Tensor:
    """Orthonormal P_j with what is random in the place of columns that are zero."""
    for _ in range(2):  # the second sweep removes what rounding left of the first
        (inside,) = total(torch.bmm(noise, P.mT))
        noise = noise - torch.bmm(inside, P)
    (grams,) = total(torch.bmm(noise, noise.mT).double())
    turns, _ = orthonormal_turns(grams, floor)
    # Columns without a direction come first in both.
    return P + torch.bmm(turns.flip(-1).mT.to(P.dtype), noise)


def used_up(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The tensors of a list, each let go of when the next is asked for."""
    while tensors:
        yield tensors.pop(0)


def _one_by_one(stack: Tensor, num: int) -> Tensor:
    """(n, K r) as (K, r, n), a view."""
    return stack.T.unflatten(0, (num, -1))
