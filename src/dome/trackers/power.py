"""Streaming power method: Algorithm 2 (UpdateSub) of the DOME paper, to the letter.

Shapes: G (B, D) samples, H = G − mean, U (D, K) basis; the paper's H is our Hᵀ. It
computes

    V = H U,  W = Hᵀ V / B,  Y = W  or  (t−1)/t U Λ + W/t,  U, R = QR(Y),  λ = ‖Y₍ⱼ₎‖

and holds U, W, Y and Q, four tall matrices. Here U alone is tall. Because UᵀU = I, the
Gram matrix of Y is a function of V and H Hᵀ V: its Cholesky factor is R, its diagonal
is λ², and U is overwritten by Y R⁻¹. Cost 4 D B K + 2 D min(B², 2 B K) flops, and
2 D K² now and then (see ``dome.numerics.factored``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dome.numerics.factored import Turn
from dome.numerics.orthonormal import gram_schmidt, inverse_cholesky
from dome.numerics.passes import compute_dtype
from dome.numerics.products import Products, Samples
from dome.numerics.together import Small, Steps, together
from dome.trackers.streaming import StreamingBasis, Verdict

# Squared share of a column of Y outside the earlier ones, below which it is rounding.
FLOOR = {torch.float32: 1e-10, torch.float64: 1e-13}
# The same, of all columns, below which Y R⁻¹ magnifies rounding more than five times.
# While ResNet-8 is trained it stays above 0.22.
INEXACT = 0.2


@dataclass(frozen=True, slots=True)
class QR:
    """R⁻¹ of Y = U R, and what was asked before U is overwritten by Y R⁻¹.

    Attributes:
        R_inverse: Shape (K, K), zero in the columns that Y does not determine.
        is_arbitrary: Mask of these columns, shape (K,).
        num_arbitrary: How many they are.
        turn: Of the update U ← U diag(s) R⁻¹ + ...
        verdict: On the samples, and whether U stays factored.
        is_inexact: Whether Y R⁻¹ has to be made orthonormal once more.
    """

    R_inverse: Tensor
    is_arbitrary: Tensor
    num_arbitrary: int
    turn: Turn
    verdict: Verdict
    is_inexact: bool


class StreamingPower(StreamingBasis):
    """The paper's tracker: a power iteration on the average centred covariance.

    The first update has rank at most B − 1. Directions beyond that are arbitrary, as
    they are with any QR, and keep the weight that Algorithm 2 gives them;
    ``effective_rank`` says how many directions samples have determined. Before the
    first update nothing is removed. ``eigenvalues`` are the column norms of Y
    (Algorithm 2's Λ); with ``oversample``, the leading singular values of Y.

    Args are those of ``dome.trackers.streaming.StreamingBasis``.
    """

    def _start(self) -> None:
        # Algorithm 1, line 2: U from QR of a random matrix, Λ = I.
        K, is_data = self._U.num_columns, torch.zeros_like(self._values)
        together([self._ledger.repair(0, is_data == 0, K)])
        # NᵀN where U = (data) + A N: how much of each column are arbitrary directions
        # A, those of the random start and those that a deficient QR made up.
        self._arbitrary = torch.diag(1 - is_data)
        self._entries = {"norms": "_values", "arbitrary": "_arbitrary"}
        if self._leading is not None:
            self._entries |= {"leading": "_leading"}
            self._entries |= {"leading_eigenvalues": "_eigenvalues"}

    def updating(self, samples: Samples) -> Steps[None]:
        """Algorithm 2, in steps for ``together``; line numbers are the paper's."""
        if not self._intake.admits(len(samples)):
            return
        past, newest = self._intake.weights()  # (t−1)/t and 1/t; 0 and 1 at t = 1
        s, a = past * self._values, newest / len(samples)
        seen = yield from self._U.products(samples)  # 4-8    V = H U
        C = gram_of_y(s, a, seen)  # 9-14   Y = U diag(s) + a Hᵀ V, as YᵀY
        qr = yield from self._qr(C, s, samples, seen)  # 15     R⁻¹
        if qr.verdict.wants_care:
            return (yield from self._begin_again(samples))
        if not self._intake.accepts(qr.verdict.is_finite):
            return
        if qr.verdict.is_constant:  # W = 0: Y has the columns of U, and λ = s
            return self._fade(past, seen)
        P, X = s[:, None] * qr.R_inverse, a * qr.R_inverse
        is_factored = qr.verdict.stays_factored
        # 15     U = Y R⁻¹ = U P + Hᵀ V X
        self._U.recombine_(qr.turn, samples, seen.V, X, factored=is_factored)
        self._values = C.diagonal().clamp(min=0.0).sqrt()  # 16-17  λ = ‖Y₍ⱼ₎‖
        self._is_turned = True
        yield from self._select_leading(C, qr.R_inverse)
        yield from self._note(samples, seen, qr, P, X)

    def _qr(self, C: Tensor, s: Tensor, samples: Samples, seen: Products) -> Steps[QR]:
        """R⁻¹ by Cholesky, or column by column where Y is deficient; one question."""
        K, floor = len(C), FLOOR[compute_dtype(self._U.dtype)]
        # Without a past, Y has no more directions than a centred batch has.
        most = K if self.num_updates else len(samples) - 1
        questions = samples.questions(seen)
        for is_deficient in (most < K, True):
            small = Small(gram_schmidt, (C,), (floor, most))
            small = small if is_deficient else Small(inverse_cholesky, (C,))
            R_inverse, own = yield small
            missing = own <= floor
            turn = yield from self._U.turn(s[:, None] * R_inverse)
            # By how much rounding counts in Y R⁻¹: columns that each have enough of
            # their own may together have little.
            magnified = (C.diagonal().sqrt()[:, None] * R_inverse).square().amax()
            more = (torch.minimum(own.min(), 1 / magnified), missing.sum())
            verdict = yield from self._verdict(questions, turn, *more)
            least, num = verdict.more
            if is_deficient or verdict.wants_care or verdict.is_constant or not num:
                break
        inexact = verdict.is_lost or least < INEXACT
        return QR(R_inverse, missing, int(num), turn, verdict, inexact)

    def _select_leading(self, C: Tensor, R_inverse: Tensor) -> Steps[None]:
        """Which directions are removed: with oversampling, those that lead in Y."""
        rank = len(self._eigenvalues)
        self._eigenvalues = self._values[:rank]
        if self._leading is not None:
            values, vectors = yield Small(left_singular, (C, R_inverse))
            self._leading = vectors[:, :rank].contiguous()
            self._eigenvalues = values[:rank]

    def _note(
        self, samples: Samples, seen: Products, qr: QR, P: Tensor, X: Tensor
    ) -> Steps[None]:
        """Repair U where that is due; note what is arbitrary, and what was captured."""
        kept = torch.where(qr.is_arbitrary, 0.0, 1.0)
        inherited = kept[:, None] * (P.T @ self._arbitrary @ P) * kept
        self._arbitrary = inherited + torch.diag(1 - kept)
        if qr.is_inexact:
            fill, num_filled = qr.is_arbitrary, qr.num_arbitrary
            yield from self._ledger.repair(self.num_updates, fill, num_filled)
        M, HHV = seen.V @ X, seen.HHV
        if qr.is_inexact or HHV is None:
            new = yield from self._U.coordinates(samples)
        else:  # G U P + G Hᵀ V X
            new = (seen.V + seen.m) @ P + HHV @ X + seen.Hmu @ M
        new = new if self._leading is None else new @ self._leading
        self._ledger.note(seen, P, M, new, self._determined())

    def _determined(self) -> Tensor:
        K = self._U.num_columns
        return K - self._arbitrary.trace().clamp(0.0, K)

    def arbitrary_in(self, C: Tensor) -> Tensor:
        """NᵀN of the columns U C, shape (K, K): see ``become_``."""
        return C.T @ self._arbitrary @ C

    def _restart(self, arbitrary: Tensor) -> None:
        fill = self._values <= 0
        # The same directions for all that go on from it, whatever their own seed.
        num, num_filled = self.num_updates, int(fill.sum())
        together([self._ledger.repair(num, fill, num_filled, seed=0)])
        self._arbitrary = arbitrary + torch.diag(fill.to(arbitrary.dtype))


def gram_of_y(s: Tensor, a: float, seen: Products) -> Tensor:
    """YᵀY of Y = U diag(s) + a Hᵀ V, because UᵀU = I; float64, shape (K, K)."""
    VV = seen.V.T @ seen.V
    C = torch.diag(s.square()) + a * (s[:, None] * VV + VV * s)
    return C + a * a * seen.VHHV


def left_singular(C: Tensor, R_inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values (..., K) of Y = U R and its left vectors in U (..., K, K)."""
    # R = R⁻ᵀ C where R is invertible; R Rᵀ has the squared singular values of Y.
    R = R_inverse.mT @ C
    squares, vectors = torch.linalg.eigh(R @ R.mT)
    return squares.flip(-1).clamp(min=0.0).sqrt(), vectors.flip(-1)
