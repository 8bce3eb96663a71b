"""Rank-K incremental singular value decomposition of the averaged centred covariance.

Brand, "Fast low-rank modifications of the thin singular value decomposition" (2006).
Shapes: G (B, D) samples, H = G − mean, U (D, K) basis, λ (K,) eigenvalues. The update
keeps the leading K left singular vectors of the tall matrix

    [ U diag(√(w λ)),  Hᵀ √a ]  =  [ U, Z ] T

with w and a B the weights of the past and of the newest batch: the best rank-K
approximation of the averaged covariance, given the last one. With V = H U and the
eigenpairs θ, E of H⊥ H⊥ᵀ, H⊥ = H − V Uᵀ, the columns of Z = H⊥ᵀ E θ^(−1/2) are
orthonormal and orthogonal to U, and T is small. If its leading left singular vectors
are X (above, for U) and X' (below, for Z), then [U, Z] [X; X'] is

    U P + Hᵀ M,    M = E θ^(−1/2) X',    P = X − Vᵀ M

Cost 8 D B K + 2 D B² flops, and 2 D K² now and then (``basis.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dome.trackers.basis import Turn
from dome.trackers.protocol import Sums
from dome.trackers.samples import Samples, Seen
from dome.trackers.tracker import BasisTracker, added_up, on_host

ROWS_AT_ONCE = 512  # H⊥ H⊥ᵀ of more samples would cost more than the update itself
# Share of the longest direction of a batch below which a direction is rounding.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-13}


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """U P + Hᵀ M and its eigenvalues, in small matrices: nothing is changed yet.

    Attributes:
        values: λ, largest first, shape (K,).
        P: Shape (K, K).
        M: Shape (B, K).
        turn: What that does to U = S Q.
        V: H U, corrected for the error of the basis, shape (B, K).
        HHM: H Hᵀ M, shape (B, K).
        doubt: What rounding may do to UᵀU = I.
    """

    values: Tensor
    P: Tensor
    M: Tensor
    turn: Turn
    V: Tensor
    HHM: Tensor
    doubt: Tensor


class IncrementalSVD(BasisTracker):
    """Best rank-K update at every batch: sorted eigenvalues, no arbitrary directions.

    The rank grows by B − 1 a batch until it is K; columns not reached yet are zero and
    remove nothing. Intake of more than 512 (or 2 K) samples are folded in by parts of
    that size, each truncated to rank K; smaller ones are exact.

    Args are those of ``dome.trackers.tracker.BasisTracker``; no direction is drawn.
    """

    def _start(self) -> None:
        self._set_values(torch.zeros_like(self._values))
        # Bound on what rounding did to UᵀU = I since the last repair.
        self._doubt = torch.zeros((), dtype=torch.float64)
        self._entries = {"values": "_values", "doubt": "_doubt"}

    def _set_values(self, values: Tensor) -> None:
        self._values, self._eigenvalues = values, values[: len(self._eigenvalues)]

    @property
    def _most(self) -> int:
        """How many samples are folded in at once."""
        return max(ROWS_AT_ONCE, 2 * self._U.num_columns)

    def look(self, H: Samples) -> Sums:
        """V = H U, and lengths."""
        return self._with_gram(H.look(self._U, pairwise=False))

    def act(self, H: Samples, sums: Sums) -> Sums:
        """H⊥ U, zero up to rounding, and H⊥ H⊥ᵀ: what samples have outside U."""
        return self._outside(H, sums) if len(H) <= self._most else {}

    def _outside(self, H: Samples, sums: Sums) -> Sums:
        V = sums["GU"] - sums["GU"].mean(dim=0)
        correction, inner = self._U.outside(H.parts, V)
        return {"correction": correction, "inner": inner}

    def fold(self, H: Samples, seen: Seen, sums: Sums, *, is_lost: bool) -> None:
        """Plan and apply, in one go or by parts."""
        past, newest = self._intake.weights()
        if len(H) > self._most:
            return self._by_parts(H, past, newest, is_lost=is_lost)
        plan = self.plan(H, seen, sums, past * self._values, newest)
        num_before = self._determined()
        self.apply(H, plan)
        seen = replace(seen, V=plan.V)
        if self._repair(plan.doubt, is_lost=is_lost):
            GU = self._coordinates(H)
        else:  # G U P + G Hᵀ M
            GU = (seen.V + seen.m) @ plan.P + plan.HHM + seen.Hmu @ plan.M
        return self._note(seen, plan.P, plan.M, GU, num_before)

    def plan(
        self, H: Samples, seen: Seen, sums: Sums, past: Tensor, newest: float
    ) -> FoldPlan:
        """The leading part of U diag(past) Uᵀ + newest Hᵀ H / B."""
        K, B, a = self._U.num_columns, len(H), newest / len(H)
        dtype = self._U.compute_dtype
        eps, noise = torch.finfo(dtype).eps, NOISE[dtype]
        correction, inner = H.in_units(sums["correction"], sums["inner"])
        V, inner = seen.V + correction, inner - correction @ correction.T
        theta, E = torch.linalg.eigh(inner)
        theta, E = theta[1:], E[:, 1:]  # a centred batch has B − 1 directions
        length = seen.energy + B * seen.mu2
        keep = (theta > noise * theta[-1]) & (theta > (32 * eps) ** 2 * length)
        theta = torch.where(keep, theta, 0.0)
        values, X = left_singular(past, a**0.5 * V, (a * theta).sqrt(), E)
        known = values[:K] > 1e-12 * values[0]  # the rounding of eigh
        X = X[:, :K] * known
        M = (E * torch.where(keep, theta, torch.inf).rsqrt()) @ X[K:]
        # Hᵀ M = Gᵀ M needs columns that sum to zero: rounding times a long mean counts.
        M = M - M.mean(dim=0)
        P = X[:K] - V.T @ M
        # Z is orthonormal up to the rounding of its Gram matrix over θ, and Hᵀ M
        # cancels against U Vᵀ M: both matter where a batch has directions of very
        # unequal length.
        ratio = torch.where(keep, theta[-1:] / theta, 0.0)[:, None]
        uneven = (X[K:].square() * ratio).sum(dim=0).amax()
        cancelled = length.sqrt() * M.norm(dim=0).amax()
        # eigh mixes short directions with those that are not there, where U has no
        # column and the batch no direction: so much of a column's length is missing.
        absent = torch.cat([past <= 0, ~keep])[:, None]
        missing = (X.square() * absent).sum(dim=0).amax()
        return FoldPlan(
            values=torch.where(known, values[:K], 0.0),
            P=P,
            M=M,
            turn=self._U.turn(P),
            V=V,
            HHM=V @ (V.T @ M) + inner @ M,
            doubt=eps * (10 * uneven + cancelled) + missing,
        )

    def apply(self, H: Samples, plan: FoldPlan) -> None:
        """U ← U P + Hᵀ M."""
        eye = torch.eye(len(plan.P), dtype=plan.P.dtype)
        self._U.turn_(plan.turn, *H.combination(plan.M, eye))
        self._set_values(plan.values)
        self._is_turned = True

    def _by_parts(
        self, H: Samples, past: float, newest: float, *, is_lost: bool
    ) -> None:
        """The same for a large batch: one part of its centred rows after the other."""
        self._values = past * self._values
        doubt = torch.zeros_like(self._doubt)
        for part in H.mirrored(-(-len(H) // self._most), self._U.compute_dtype):
            sums = added_up(self.total, [part.look(self._U, pairwise=False)])
            more = added_up(self.total, [self._outside(part, sums[0])])
            (known,) = on_host([sums[0] | more[0]])
            share = newest * len(part) / len(H)
            plan = self.plan(part, part.seen(known), known, self._values, share)
            self.apply(part, plan)
            doubt = doubt + plan.doubt
        self._repair(doubt, is_lost=is_lost)
        (known,) = on_host(added_up(self.total, [H.look(self._U, pairwise=False)]))
        self._note_no_change(H.seen(known))

    def _repair(self, doubt: Tensor, *, is_lost: bool) -> bool:
        """Make U orthonormal again once rounding may have cost it too much."""
        self._doubt = self._doubt + doubt
        eps, rank = torch.finfo(self._U.compute_dtype).eps, int(self._determined())
        is_due = rank > 0 and (is_lost or bool(self._doubt > 16 * eps))
        if is_due:
            fill = torch.zeros_like(self._values, dtype=torch.bool)
            self._U.orthonormalize_(self.num_updates, fill, rank)
            self._doubt = torch.zeros_like(self._doubt)
        return is_due

    def _determined(self) -> float:
        return float((self._values > 0).sum())

    def _required_in(self, state: Mapping[str, Tensor]) -> Tensor:
        values = state.get("values")
        if not isinstance(values, Tensor) or values.shape != self._values.shape:
            return self._values > torch.inf  # refused by its name
        return values > 0

    def arbitrary_in(self, C: Tensor) -> Tensor:
        """How much of the columns U C is arbitrary, shape (K, K): none of it."""
        return torch.zeros_like(C)

    def _restart(self, arbitrary: Tensor) -> None:
        del arbitrary  # no direction of this tracker is
        self._repair(torch.zeros_like(self._doubt), is_lost=True)


def left_singular(
    past: Tensor, inside: Tensor, lengths: Tensor, E: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared singular values and left vectors of T, largest first.

    T = [ diag(√past),  insideᵀ ;  0,  diag(lengths) Eᵀ ]
    """
    top = torch.cat([torch.diag(past.sqrt()), inside.T], dim=1)
    below = (E * lengths).T
    zeros = below.new_zeros(len(below), len(past))
    T = torch.cat([top, torch.cat([zeros, below], dim=1)])
    values, X = torch.linalg.eigh(T @ T.T)
    return values.flip(0), X.flip(1)
