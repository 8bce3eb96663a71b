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

Cost 8 D B K + 2 D B² flops, and 2 D K² now and then (see ``dome.numerics.factored``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dome.numerics.factored import Turn
from dome.numerics.passes import compute_dtype
from dome.numerics.products import Products, Rows
from dome.numerics.together import Ask, Small, Steps, together
from dome.trackers.streaming import StreamingBasis

ROWS_AT_ONCE = 512  # H⊥ H⊥ᵀ of more samples would cost more than the update itself
# Share of the longest direction of a batch below which a direction is rounding.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-13}


@dataclass(frozen=True, slots=True)
class Folded:
    """U P + Hᵀ M and its eigenvalues, in small matrices: nothing is changed yet.

    Attributes:
        values: λ, largest first, shape (K,).
        rank: How many of them are not zero, a scalar.
        P: Shape (K, K).
        M: Shape (B, K).
        V: H U, corrected for the error of the basis, shape (B, K).
        HHM: H Hᵀ M, shape (B, K).
        doubt: What rounding may do to UᵀU = I, a scalar.
    """

    values: Tensor
    rank: Tensor
    P: Tensor
    M: Tensor
    V: Tensor
    HHM: Tensor
    doubt: Tensor


class IncrementalSVD(StreamingBasis):
    """Best rank-K update at every batch: sorted eigenvalues, no arbitrary directions.

    The rank grows by B − 1 a batch until it is K; columns not reached yet are zero and
    remove nothing. Batches of more than 512 (or 2 K) samples are folded in by parts of
    that size, each truncated to rank K; smaller ones are exact.

    Args are those of ``dome.trackers.streaming.StreamingBasis``; no direction is drawn.
    """

    def _start(self) -> None:
        self._set_values(torch.zeros_like(self._values))
        # Bound on what rounding did to UᵀU = I since the last repair.
        self._doubt = torch.zeros((), dtype=torch.float64)
        self._entries = {"values": "_values", "doubt": "_doubt"}

    def _set_values(self, values: Tensor) -> None:
        self._values, self._eigenvalues = values, values[: len(self._eigenvalues)]

    def updating(self, samples: Rows) -> Steps[None]:
        """The update, in steps for ``together``."""
        if not self._intake.admits(len(samples)):
            return
        past, newest = self._intake.weights()
        seen = yield from self._U.products_without_action(samples)
        if len(samples) > max(ROWS_AT_ONCE, 2 * self._U.num_columns):
            return (yield from self._by_parts(samples, seen, past, newest))
        new = yield from self._folded(samples, seen, past * self._values, newest)
        turn = yield from self._U.turn(new.P)
        questions = samples.questions(seen)
        verdict = yield from self._verdict(questions, turn, new.rank, new.doubt)
        if verdict.wants_care:
            return (yield from self._begin_again(samples))
        if not self._intake.accepts(verdict.is_finite):
            return
        if verdict.is_constant:
            return self._fade(past, seen)
        self._overwrite_(samples, new, turn, factored=verdict.stays_factored)
        is_repaired = yield from self._repair(*verdict.more, is_lost=verdict.is_lost)
        seen = replace(seen, V=new.V)
        if is_repaired:
            coords = yield from self._U.coordinates(samples)
        else:  # G U P + G Hᵀ M
            coords = (seen.V + seen.m) @ new.P + new.HHM + seen.Hmu @ new.M
        coords = coords[:, : len(self._eigenvalues)]
        self._ledger.note(seen, new.P, new.M, coords, new.rank)

    def _by_parts(
        self, samples: Rows, seen: Products, past: float, newest: float
    ) -> Steps[None]:
        """The same for a large batch: one part of its centred rows after the other."""
        finite, constant, care = yield Ask(samples.questions(seen))
        if care:
            return (yield from self._begin_again(samples))
        if not self._intake.accepts(finite):
            return
        if constant:
            return self._fade(past, seen)
        self._values = past * self._values
        num_parts = -(-len(samples) // max(ROWS_AT_ONCE, 2 * self._U.num_columns))
        dtype = torch.promote_types(samples.rows.dtype, compute_dtype(self._U.dtype))
        power = 1.0 if samples.power is None else samples.power
        parts = samples.rows.tensor_split(num_parts)
        sums = [samples.multiplied(part, dtype).sum(dim=0) for part in parts]
        mean = torch.stack(sums).sum(dim=0) / len(samples)
        doubt = self._values.new_zeros(())
        for part in parts:
            # Rows are centred on the whole batch; the part's own mean then is variance
            # too, which the mirrored rows keep: [h; −h]/√2 has mean zero.
            rows = (samples.multiplied(part, dtype) - mean) * 0.5**0.5
            both = Rows(torch.cat([rows, -rows]), samples.scale / power)
            share = newest * len(both) / len(samples)
            inner = yield from self._U.products_without_action(both)
            new = yield from self._folded(both, inner, self._values, share)
            turn = yield from self._U.turn(new.P)
            self._overwrite_(both, new, turn, factored=False)
            doubt = doubt + new.doubt
        rank = self._determined()
        answers = yield Ask((rank, doubt))
        yield from self._repair(*answers)
        seen = yield from self._U.products_without_action(samples)
        self._ledger.note_no_change(seen, self._leading, rank)

    def _folded(
        self, samples: Rows, seen: Products, past: Tensor, newest: float
    ) -> Steps[Folded]:
        """The leading part of U diag(past) Uᵀ + newest Hᵀ H / B."""
        K, B, a = self._U.num_columns, len(samples), newest / len(samples)
        dtype = compute_dtype(self._U.dtype)
        eps, noise = torch.finfo(dtype).eps, NOISE[dtype]
        correction, inner = yield from self._U.outside(samples, seen.V)
        # A batch that is not finite, or whose squares are not, is left out later, and
        # must not stop eigh here.
        is_usable = seen.energy.square().isfinite()
        V = torch.where(is_usable, seen.V + correction, 0.0).nan_to_num(0.0, 0.0, 0.0)
        inner = torch.where(is_usable, inner - correction @ correction.T, 0.0)
        inner = inner.nan_to_num(0.0, 0.0, 0.0)
        theta, E = yield Small(torch.linalg.eigh, (inner,))
        theta, E = theta[1:], E[:, 1:]  # a centred batch has B − 1 directions
        length = (seen.energy + B * seen.mu2).nan_to_num(0.0, 0.0, 0.0)
        keep = (theta > noise * theta[-1]) & (theta > (32 * eps) ** 2 * length)
        theta = torch.where(keep, theta, 0.0)
        lengths = (a * theta).sqrt()
        values, X = yield Small(left_singular, (past, a**0.5 * V, lengths, E))
        known = values[:K] > 1e-12 * values[0]  # the rounding of eigh
        X = X[:, :K] * known
        M = (E * torch.where(keep, theta, torch.inf).rsqrt()) @ X[K:]
        # Hᵀ M = Gᵀ M needs columns that sum to zero: rounding times a long mean counts.
        M = M - M.mean(dim=0)
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
        return Folded(
            values=torch.where(known, values[:K], 0.0),
            rank=known.sum(),
            P=X[:K] - V.T @ M,
            M=M,
            V=V,
            HHM=V @ (V.T @ M) + inner @ M,
            doubt=eps * (10 * uneven + cancelled) + missing,
        )

    def _overwrite_(
        self, samples: Rows, new: Folded, turn: Turn, *, factored: bool
    ) -> None:
        eye = torch.eye(len(new.P), dtype=new.P.dtype, device=new.P.device)
        self._U.recombine_(turn, samples, new.M, eye, factored=factored)
        self._set_values(new.values)
        self._is_turned = True

    def _repair(
        self, rank: float, doubt: float, *, is_lost: bool = False
    ) -> Steps[bool]:
        """Make U orthonormal again once rounding may have cost it too much."""
        self._doubt = self._doubt + doubt
        eps = torch.finfo(compute_dtype(self._U.dtype)).eps
        is_due = rank > 0 and (is_lost or bool(self._doubt > 16 * eps))
        if is_due:
            no = torch.zeros_like(self._values, dtype=torch.bool)
            yield from self._ledger.repair(self.num_updates, no, 0, int(rank))
            self._doubt = torch.zeros_like(self._doubt)
        return is_due

    def _determined(self) -> Tensor:
        return (self._values > 0).sum()

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
        together([self._repair(self.effective_rank, 0.0, is_lost=True)])


def left_singular(
    past: Tensor, inside: Tensor, lengths: Tensor, E: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared singular values and left vectors of T, largest first.

    T = [ diag(√past),  insideᵀ ;  0,  diag(lengths) Eᵀ ]
    """
    top = torch.cat([torch.diag_embed(past.sqrt()), inside.mT], dim=-1)
    below = (E * lengths.unsqueeze(-2)).mT
    zeros = below.new_zeros(*below.shape[:-1], past.shape[-1])
    T = torch.cat([top, torch.cat([zeros, below], dim=-1)], dim=-2)
    values, X = torch.linalg.eigh(T @ T.mT)
    return values.flip(-1), X.flip(-1)
