"""Streaming power method: Algorithm 2 (UpdateSub) of the DOME paper, to the letter.

Shapes: G (B, D) samples, H = G − mean, U (D, K) basis; the paper's H is our Hᵀ. It
computes

    V = H U,  W = Hᵀ V / B,  Y = W  or  (t−1)/t U Λ + W/t,  U, R = QR(Y),  λ = ‖Y₍ⱼ₎‖

and holds U, W, Y and Q, four tall matrices (``dome.reference`` has it so). Here U alone
is tall. Because UᵀU = I, the Gram matrix of Y = U diag(s) + a Hᵀ V is a function of V
and H Hᵀ V: its Cholesky factor is R, its diagonal is λ², and U is overwritten by Y R⁻¹.
Cost 4 D B K + 2 D min(B², 2 B K) flops, and 2 D K² now and then (``basis.py``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dome.trackers.basis import Turn
from dome.trackers.linalg import gram_schmidt, inverse_cholesky
from dome.trackers.protocol import Sums
from dome.trackers.samples import Samples, Seen
from dome.trackers.tracker import BasisTracker

# Squared share of a column of Y outside the earlier ones, below which it is rounding.
FLOOR = {torch.float32: 1e-10, torch.float64: 1e-13}
# The same, of all columns, below which Y R⁻¹ magnifies rounding more than five times.
# While ResNet-8 is trained it stays above 0.22.
INEXACT = 0.2


def is_pairwise(num_columns: int, num_samples: int) -> bool:
    """Whether H Hᵀ V is formed from H Hᵀ, 2 D B² flops, or in two steps, 4 D B K."""
    return num_samples <= 2 * num_columns


@dataclass(frozen=True, slots=True)
class PowerPlan:
    """An update in small matrices: nothing is changed yet.

    Attributes:
        C: YᵀY, shape (K, K).
        R_inverse: R⁻¹ of Y = U R, zero in the columns that Y does not determine.
        own: What each column of Y has outside the earlier ones, zero for those.
        P: U becomes U P + Hᵀ V X; shape (K, K).
        X: Shape (K, K).
        turn: What that does to U = S Q.
    """

    C: Tensor
    R_inverse: Tensor
    own: Tensor
    P: Tensor
    X: Tensor
    turn: Turn


class StreamingPower(BasisTracker):
    """The paper's tracker: a power iteration on the average centred covariance.

    The first update has rank at most B − 1. Directions beyond that are arbitrary, as
    they are with any QR, and keep the weight that Algorithm 2 gives them;
    ``effective_rank`` says how many directions samples have determined. Before the
    first update nothing is removed. ``eigenvalues`` are the column norms of Y
    (Algorithm 2's Λ); with ``oversample``, the leading singular values of Y.

    Args are those of ``dome.trackers.tracker.BasisTracker``.
    """

    def _start(self) -> None:
        # Algorithm 1, line 2: U from QR of a random matrix, Λ = I.
        self._U.orthonormalize_(0, self._values > 0)
        self._floor = FLOOR[self._U.compute_dtype]
        # NᵀN where U = (data) + A N: how much of each column are arbitrary directions
        # A, those of the random start and those that a deficient QR made up.
        self._arbitrary = torch.diag(self._values)
        self._entries = {"norms": "_values", "arbitrary": "_arbitrary"}
        if self._leading is not None:
            self._entries |= {"leading": "_leading"}
            self._entries |= {"leading_eigenvalues": "_eigenvalues"}

    def look(self, H: Samples) -> Sums:
        """Line 8, V = H U, and H Hᵀ for line 9 where few samples make it cheap."""
        pairwise = is_pairwise(self._U.num_columns, len(H))
        return self._with_gram(H.look(self._U, pairwise=pairwise))

    def act(self, H: Samples, sums: Sums) -> Sums:
        """Line 9, W = Hᵀ V / B, as H W: H Hᵀ V, where it takes a pass of its own."""
        return {} if "GG" in sums else H.act(self._U, sums)

    def fold(self, H: Samples, seen: Seen, sums: Sums, *, is_lost: bool) -> None:
        """Plan and apply."""
        del sums
        self.apply(H, seen, self.plan(seen), is_lost=is_lost)

    def plan(self, seen: Seen) -> PowerPlan:
        """Lines 10 to 15 in small matrices; line numbers are the paper's."""
        past, newest = self._intake.weights()  # (t−1)/t and 1/t; 0 and 1 at t = 1
        s, a = past * self._values, newest / len(seen.V)
        VV = seen.V.T @ seen.V  # 4-8    V = H U
        # 10-14  Y = U diag(s) + a Hᵀ V, as YᵀY, because UᵀU = I
        C = torch.diag(s.square()) + a * (s[:, None] * VV + VV * s)
        C = C + a * a * seen.VHHV
        # Without a past, Y has no more directions than a centred batch has.
        most = len(C) if past else len(seen.V) - 1
        R_inverse, own = self._qr(C, most)  # 15     U, R = QR(Y)
        P = s[:, None] * R_inverse
        return PowerPlan(C, R_inverse, own, P, a * R_inverse, self._U.turn(P))

    def apply(self, H: Samples, seen: Seen, plan: PowerPlan, *, is_lost: bool) -> None:
        """Lines 15 to 17: overwrite U, and make it orthonormal where that is due."""
        # 15     U = Y R⁻¹ = U P + Hᵀ V X
        self._U.turn_(plan.turn, *H.combination(seen.V, plan.X))
        self._values = plan.C.diagonal().clamp(min=0.0).sqrt()  # 16-17  λ = ‖Y₍ⱼ₎‖
        self._is_turned = True
        self._select_leading(plan)
        kept = (plan.own > self._floor).to(torch.float64)
        inherited = kept[:, None] * (plan.P.T @ self._arbitrary @ plan.P) * kept
        self._arbitrary = inherited + torch.diag(1 - kept)
        # By how much rounding counts in Y R⁻¹: columns that each have enough of their
        # own may together have little.
        magnified = (plan.C.diagonal().sqrt()[:, None] * plan.R_inverse).square().amax()
        inexact = bool(plan.own.min() < INEXACT or 1 / magnified < INEXACT)
        M, P, X = seen.V @ plan.X, plan.P, plan.X
        if is_lost or inexact:
            self._U.orthonormalize_(self.num_updates, kept == 0)
        if is_lost or inexact or seen.HHV is None:
            GU = self._coordinates(H)
        else:  # G U P + G Hᵀ V X
            GU = (seen.V + seen.m) @ P + seen.HHV @ X + seen.Hmu @ M
        self._note(seen, P, M, GU, len(P))

    def _qr(self, C: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """R⁻¹ by Cholesky, or column by column where Y is deficient."""
        if most >= len(C):
            R_inverse, own = inverse_cholesky(C)
            if own.min() > self._floor:
                return R_inverse, own
        return gram_schmidt(C, self._floor, most)

    def _select_leading(self, plan: PowerPlan) -> None:
        """Which directions are removed: with oversampling, those that lead in Y."""
        rank = len(self._eigenvalues)
        self._eigenvalues = self._values[:rank]
        if self._leading is not None:  # left singular vectors of Y = U R, R = R⁻ᵀ C
            R = plan.R_inverse.T @ plan.C
            squares, vectors = torch.linalg.eigh(R @ R.T)
            self._leading = vectors.flip(1)[:, :rank].contiguous()
            self._eigenvalues = squares.flip(0)[:rank].clamp(min=0.0).sqrt()

    def _determined(self) -> float:
        K = self._U.num_columns
        return K - float(self._arbitrary.trace().clamp(0.0, K))

    def arbitrary_in(self, C: Tensor) -> Tensor:
        """NᵀN of the columns U C, shape (K, K): see ``become_``."""
        return C.T @ self._U.there(self._arbitrary) @ C

    def _restart(self, arbitrary: Tensor) -> None:
        fill = self._values <= 0
        # The same directions for all that go on from it, whatever their own seed.
        self._U.orthonormalize_(self.num_updates, fill, seed=0)
        self._arbitrary = arbitrary + torch.diag(fill.to(arbitrary.dtype))
