"""Streaming power method: Algorithm 2 (UpdateSub) of the DOME paper, to the letter.

Shapes: G (B, D) samples, H = G − mean, U (D, K) basis; the paper's H is our Hᵀ. It
computes

    V = H U,  W = Hᵀ V / B,  Y = W  or  (t−1)/t U Λ + W/t,  U, R = QR(Y),  λ = ‖Y₍ⱼ₎‖

and holds U, W, Y and Q, four tall matrices. Here U alone is tall. Because UᵀU = I, the
Gram matrix of Y is a function of V and H Hᵀ V: its Cholesky factor is R, its diagonal
is λ², and U is overwritten by Y R⁻¹. Cost 4 D B K + 2 D min(B², 2 B K) flops, and
2 D K² now and then (see ``dome.numerics.factored``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.numerics.factored import Factored, Turn
from dome.numerics.orthonormal import gram_schmidt, inverse_cholesky
from dome.numerics.passes import compute_dtype
from dome.numerics.products import Products, Rows, Samples
from dome.numerics.shard import Shard
from dome.numerics.together import Ask, Small, Steps, together
from dome.trackers.intake import Intake
from dome.trackers.ledger import Ledger
from dome.trackers.protocol import Update
from dome.trackers.states import check_small, draw_seed, translated

# Squared share that a column of Y has of its own, below which it is rounding.
FLOOR = {torch.float32: 1e-10, torch.float64: 1e-13}
SHAKY = 0.05  # the same, below which U = Y R⁻¹ costs more than a digit


@dataclass(frozen=True, slots=True)
class QR:
    """R⁻¹ of Y = U R, and all that is to be decided before U is overwritten by Y R⁻¹.

    Attributes:
        R_inverse: Shape (K, K), zero in the columns that Y leaves open.
        is_open: Mask of these columns, shape (K,).
        num_open: How many they are.
        turn: Of the update U ← U diag(s) R⁻¹ + ...
        stays_factored: Whether U may stay factored.
        is_shaky: Whether U is to be made orthonormal once more.
        is_finite: Whether the samples are.
        is_constant: Whether they are all the same, up to rounding: W = 0.
        wants_care: Whether to begin again with samples that are centred first.
    """

    R_inverse: Tensor
    is_open: Tensor
    num_open: int
    turn: Turn
    stays_factored: bool
    is_shaky: bool
    is_finite: bool
    is_constant: bool
    wants_care: bool


class StreamingPower:
    """The paper's tracker: a power iteration on the average centred covariance.

    The first update has rank at most B − 1. Directions beyond that are arbitrary, as
    they are with any QR, and keep the weight that Algorithm 2 gives them;
    ``effective_rank`` says how much of the basis is owed to samples. Before the first
    update nothing is removed.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        forget: None averages all batches (the paper); a number in (0, 1) is the weight
            of the newest batch instead.
        oversample: Track this many directions more, and remove the leading K left
            singular vectors of Y.
        dtype: What the basis is stored in: float32, float64, or bfloat16 with float32
            arithmetic.
        device: Where the basis lives.
        generator: Source of the initial basis. Without one, a fixed seed is used.
        shard: The rows of U, and columns of samples, that are held here, if other
            workers hold the others; all workers must update together.
        factored: Keep U as a product S Q where that saves time. Reading ``basis`` then
            makes a copy; if it is read at every step, choose False.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        *,
        forget: float | None = None,
        oversample: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        shard: Shard | None = None,
        factored: bool = True,
    ) -> None:
        self._intake = Intake(dim, rank, oversample, forget, shard)
        K = self._intake.num_columns
        self._U = Factored(self._intake.shard, K, dtype, device, factored=factored)
        self._ledger = Ledger(self._U, draw_seed(generator))
        # Algorithm 1, line 2: U from QR of a random matrix, Λ = I.
        every = torch.ones(K, dtype=torch.bool, device=device)
        together([self._ledger.repair(0, every, K)])
        self._norms = torch.ones(K, dtype=torch.float64, device=device)
        # NᵀN where U = (data) + A N: how much of each column is owed to arbitrary
        # directions A, those of the random start and those that a deficient QR made up.
        self._arbitrary = torch.eye(K, dtype=torch.float64, device=device)
        # Which directions of U are removed, (K, rank), and what belongs to them.
        self._leading = self._arbitrary[:, :rank].clone() if rank < K else None
        self._eigenvalues = self._norms[:rank]
        self._is_turned = False  # by a sample: before, U is random

    @torch.no_grad()
    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        self._intake.check(grads)
        together([self.updating(Rows(grads, scale))])

    takes_actions = True  # samples need not be rows: see ``Samples``

    def updating(self, samples: Samples) -> Steps[None]:
        """Algorithm 2, in steps for ``together``; line numbers are the paper's."""
        if not self._intake.admits(len(samples)):
            return
        past, newest = self._intake.weights()  # (t−1)/t and 1/t; 0 and 1 at t = 1
        s, a = past * self._norms, newest / len(samples)
        seen = yield from self._U.products(samples)  # 4-8    V = H U
        C = gram_of_y(s, a, seen)  # 9-14   Y = U diag(s) + a Hᵀ V, as YᵀY
        qr = yield from self._qr(C, s, samples, seen)  # 15     R⁻¹
        if qr.wants_care:
            careful = yield from samples.careful(self._U.shard)
            return (yield from self.updating(careful))
        if not self._intake.accepts(qr.is_finite):
            return
        if qr.is_constant:  # W = 0: Y has the columns of U, and λ = s
            self._norms, self._eigenvalues = s, past * self._eigenvalues
            self._ledger.note_no_change(seen, self._leading, self._rank())
            return
        P, X = s[:, None] * qr.R_inverse, a * qr.R_inverse
        # 15     U = Y R⁻¹ = U P + Hᵀ V X
        self._U.recombine_(qr.turn, samples, seen.V, X, factored=qr.stays_factored)
        self._is_turned = True
        self._norms = C.diagonal().clamp(min=0.0).sqrt()  # 16-17  λ = ‖Y₍ⱼ₎‖
        yield from self._select_leading(C, qr.R_inverse)
        yield from self._keep_books(samples, seen, qr, P, X)

    def _qr(self, C: Tensor, s: Tensor, samples: Samples, seen: Products) -> Steps[QR]:
        """R⁻¹ by Cholesky, or column by column where Y is deficient; one question."""
        K, num_updates = len(C), self._intake.num_updates
        floor = FLOOR[compute_dtype(self._U.dtype)]
        # Without a past, Y has no more directions than a centred batch has.
        most = K if num_updates else len(samples) - 1
        error = yield from self._ledger.error(num_updates)
        questions = samples.questions(seen)
        for deficient in (most < K, True):
            small = Small(gram_schmidt, (C,), (floor, most))
            small = small if deficient else Small(inverse_cholesky, (C,))
            R_inverse, own = yield small
            is_open = own <= floor
            turn = yield from self._U.turn(s[:, None] * R_inverse)
            asked = (*questions, turn.is_good, own.min(), is_open.sum(), error)
            finite, constant, care, good, least, num_open, lost = yield Ask(asked)
            if deficient or care or constant or not num_open:
                break
        return QR(
            R_inverse=R_inverse,
            is_open=is_open,
            num_open=int(num_open),
            turn=turn,
            stays_factored=bool(good),
            is_shaky=self._ledger.is_lost(lost) or least < SHAKY,
            is_finite=bool(finite),
            is_constant=bool(constant),
            wants_care=bool(care),
        )

    def _select_leading(self, C: Tensor, R_inverse: Tensor) -> Steps[None]:
        """Which directions are removed: with oversampling, those that lead in Y."""
        self._eigenvalues = self._norms[: len(self._eigenvalues)]
        if self._leading is not None:
            values, vectors = yield Small(left_singular, (C, R_inverse))
            self._leading = vectors[:, : self._leading.shape[1]].contiguous()
            self._eigenvalues = values[: len(self._eigenvalues)]

    def _keep_books(
        self, samples: Samples, seen: Products, qr: QR, P: Tensor, X: Tensor
    ) -> Steps[None]:
        """Repair U where that is due; note what is arbitrary, and what was captured."""
        kept = torch.where(qr.is_open, 0.0, 1.0)
        owed = kept[:, None] * (P.T @ self._arbitrary @ P) * kept
        self._arbitrary = owed + torch.diag(1 - kept)
        if qr.is_shaky:
            num = self._intake.num_updates
            yield from self._ledger.repair(num, qr.is_open, qr.num_open)
        M, A, HHV = seen.V @ X, self._leading, seen.HHV
        if qr.is_shaky or HHV is None:
            new = yield from self._U.coordinates(samples)
        else:  # G U P + G Hᵀ V X
            new = (seen.V + seen.m) @ P + HHV @ X + seen.Hmu @ M
        self._ledger.note(seen, P, M, new if A is None else new @ A, self._rank())

    def _rank(self) -> Tensor:
        """How many directions are owed to samples and not to chance, a scalar."""
        K = self._U.num_columns
        return K - self._arbitrary.trace().clamp(0.0, K)

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        return self._ledger.newest

    @property
    def basis(self) -> Tensor:
        """U, orthonormal columns, shape (D, K); clone it to keep it past an update."""
        return self._U.matrix if self._leading is None else self._U.times(self._leading)

    @property
    def columns(self) -> Tensor:
        """All the tracked columns, shape (D, K + oversample); clone them to keep."""
        return self._U.matrix

    @property
    def eigenvalues(self) -> Tensor:
        """Column norms of Y (Algorithm 2's Λ), shape (K,); ones before any update."""
        return self._eigenvalues.clone()

    @property
    def effective_rank(self) -> float:
        """How many of the tracked directions are owed to samples and not to chance."""
        return float(self._rank())

    @property
    def num_skipped(self) -> int:
        """Batches left out: not finite, or of one sample."""
        return self._intake.num_skipped

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""
        return self._ledger.orthogonality_error

    @torch.no_grad()
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U Uᵀ g for a gradient of shape (D,).

        Before a sample has turned U, it is random, and nothing is removed.
        """
        strength = strength if self._is_turned else 0.0
        return self._U.project_out(gradient, self._leading, strength)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a snapshot, D K numbers."""
        return self._U.state_dict() | {n: t.clone() for n, t in self._small().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what is no state of such a tracker by name; nothing is changed."""
        self._U.check_state(translated(state))
        check_small(state, self._small())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""
        self.check_state(state)
        self._U.load_state_dict(translated(state))
        self._intake.load_state_dict(state)
        self._ledger.load_state_dict(state)
        rank = len(self._eigenvalues)
        self._norms = state["norms"].to(self._norms, copy=True)
        self._arbitrary = state["arbitrary"].to(self._arbitrary, copy=True)
        self._eigenvalues = self._norms[:rank]
        self._is_turned = self.effective_rank > 0
        if self._leading is not None:
            self._leading = state["leading"].to(self._leading, copy=True)
            self._eigenvalues = state["leading_eigenvalues"].to(self._norms, copy=True)

    def _small(self) -> dict[str, Tensor]:
        """The state without U."""
        own = {"norms": self._norms, "arbitrary": self._arbitrary}
        if self._leading is not None:
            own |= {"leading": self._leading, "leading_eigenvalues": self._eigenvalues}
        return own | self._intake.state_dict() | self._ledger.state_dict()

    @torch.no_grad()
    def become_(
        self, columns: Tensor, values: Tensor, arbitrary: Tensor, num_updates: int
    ) -> None:
        """Go on from a basis that several trackers have in common.

        Args:
            columns: Orthogonal, zero where nothing determines them, shape (D, K).
            values: Their eigenvalues, largest first, shape (K,); zero likewise.
            arbitrary: NᵀN of the columns, summed over trackers, shape (K, K).
            num_updates: How many updates they stand for.
        """
        is_open = values <= 0
        self._U.multiplied_out().copy_(columns)
        num_open = int(is_open.sum())
        self._intake.num_updates = num_updates
        # The same directions for all that go on from it, whatever their own seed.
        together([self._ledger.repair(num_updates, is_open, num_open, seed=0)])
        self._norms = values
        self._arbitrary = arbitrary + torch.diag(is_open.to(arbitrary.dtype))
        self._eigenvalues = values[: len(self._eigenvalues)]
        self._is_turned = self.effective_rank > 0
        if self._leading is not None:
            eye = torch.eye(len(values), dtype=torch.float64, device=values.device)
            self._leading = eye[:, : self._leading.shape[1]].contiguous()
        self._ledger.forget()

    def arbitrary_in(self, C: Tensor) -> Tensor:
        """NᵀN of the columns U C, shape (K, K): see ``become_``."""
        return C.T @ self._arbitrary @ C

    @property
    def column_values(self) -> Tensor:
        """Eigenvalues of all the tracked ``columns``."""
        return self._norms

    @property
    def num_updates(self) -> int:
        """How many batches have turned the basis."""
        return self._intake.num_updates


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
