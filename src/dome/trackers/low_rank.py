"""Algorithm 2 with directions of low rank, for models whose D × K does not fit.

Shapes: G (B, D) samples, H = G − mean, U (D, K) directions, each of rank r in every
weight matrix (``dome.trackers.thin``), independent but not orthogonal. With N = UᵀU
and T = R⁻¹ of its Cholesky factor, U T is orthonormal, and is the U of Algorithm 2:

    V = H U T,   Y = U T diag(s) + a Hᵀ V,   U ← cut(Y Z),   λ_j = ‖Y₍ⱼ₎‖

``cut`` brings every column to rank r in every weight matrix. QR(Y) and QR(Y Z) have
the same orthonormal factor for every upper triangular Z with positive diagonal, so that
Z may be chosen for the cut's sake: it is R⁻¹ of the QR of (U T)ᵀ Y = diag(s) + a VᵀV.
That makes the columns of Y Z nearly orthonormal (randomised Gram-Schmidt) without
H Hᵀ. Where r is as large as the matrices allow, nothing is cut: this is Algorithm 2.

Neither G, Y nor U are formed where samples are products of inputs and output gradients.
Cost 2 B T K r (2 m + 3 n) flops for each weight (n, m) that meets T positions a sample,
against 6 B T n m of a forward and backward pass; K r (n + m) numbers are stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dome.torch_private import own_arithmetic
from dome.trackers.directions import Directions, Products, Shapes
from dome.trackers.factors import FactorBatch
from dome.trackers.independence import Independent, independent
from dome.trackers.lengths import squared_lengths
from dome.trackers.linalg import IsTrue, Shard, Total, alone, upper_factor
from dome.trackers.protocol import Squares, Sums, Update
from dome.trackers.samples import Intake, check_whole
from dome.trackers.states import check_small, draw_seed
from dome.trackers.tracker import update_all

# Squared share that a column of (U T)ᵀ Y has of its own, below which it is rounding;
# ‖V‖ over the mean's, in units of the precision, below which V is.
FLOOR = {torch.float32: 1e-10, torch.float64: 1e-13}
ROUNDING = 16
SMALL = 1 << 22  # numbers that may be held twice for the sake of a question
# Updates from one at which the lengths of samples are measured to the next. They take
# at most a third of a forward and backward pass: less than 2 % of a step on average.
LENGTHS_EVERY = 20
PATIENCE = 16  # updates without an assumption after one that was wrong


class Sought(NamedTuple):
    """Y = U T diag(s) + Gᵀ V, of samples G: what U is to become.

    Attributes:
        s: Shape (K,).
        V: Weights of the samples, shape (B, K).
        core: (U T)ᵀ Y, shape (K, K).
        most: How many directions Y can have.
    """

    s: Tensor
    V: Tensor
    core: Tensor
    most: int


@dataclass(slots=True)
class Batch:
    """Samples, and what an update has found out about them so far.

    Attributes:
        grads: The samples, parameter by parameter.
        scale: Factor on all of them.
        num_samples: B, of all workers.
        lengths: ‖g_b‖² of the samples here, shape (b,), where they are measured.
        seen: Their products with U.
        sought: What U is to become.
        turned: The same in directions of low rank, on the terms of assumptions.
    """

    grads: FactorBatch
    scale: float
    num_samples: int
    lengths: Tensor | None = None
    seen: Products = field(init=False)
    sought: Sought = field(init=False)
    turned: tuple[Independent, Tensor, Tensor] | None = field(init=False)


class Assumed:
    """Takes conditions that nearly always hold for true, to be asked about together.

    What is computed on such terms is thrown away where one of them did not hold.
    """

    def __init__(self) -> None:
        self._conditions: list[Tensor] = []

    def __call__(self, condition: Tensor) -> bool:
        """True for now."""
        self._conditions.append(condition)
        return True

    def was_right(self) -> tuple[Tensor, ...]:
        """Whether each of them holds, scalars."""
        return tuple(self._conditions)


class LowRankPower:
    """The paper's tracker with directions that are thin products in weight matrices.

    Args:
        shapes: The parameters' shapes, in the order of the flat gradient.
        rank: Number of directions K.
        direction_rank: Their rank r in every weight matrix.
        forget: None averages all batches; a number in (0, 1) is the weight of the
            newest batch instead.
        oversample: Track this many directions more, and remove the leading K left
            singular vectors of Y.
        dtype: What directions are stored and multiplied in: float32 or float64.
        device: Where they live.
        generator: Source of the initial directions. Without one, a fixed seed is used.
        total: Adds up tensors over workers, if each has samples of its own; all hold
            the same directions and must update together.
        shard: The columns of samples that are held here, rows of each parameter, if
            other workers hold the others; all must update together.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        rank: int,
        direction_rank: int,
        *,
        forget: float | None = None,
        oversample: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        total: Total = alone,
        shard: Shard | None = None,
    ) -> None:
        check_whole(direction_rank=direction_rank)
        if direction_rank < 1:
            raise ValueError(f"direction_rank must be at least 1, got {direction_rank}")
        if dtype not in FLOOR:
            raise ValueError(
                f"directions of low rank are stored in torch.float32 or torch.float64, "
                f"got {dtype}: leave basis_dtype out"
            )
        self._shapes = Shapes.of(shapes, direction_rank, shard)
        self._intake = Intake(self._shapes.dim, rank, oversample, forget, shard)
        self._dtype, self._device = dtype, torch.device(device or "cpu")
        self._seed, self._total = draw_seed(generator), total
        K = self._intake.num_columns
        eye = torch.eye(K, dtype=torch.float64, device=device)
        start = independent(self._random(), self._random)
        self._U, self._T, self._N = start.U, start.T, start.N
        self._norms = torch.ones(K, dtype=torch.float64, device=device)
        # NᵀN where U T = (data) + A N, of arbitrary directions A.
        self._arbitrary = eye.clone()
        self._leading = eye[:, :rank].clone() if rank < K else None
        self._eigenvalues = self._norms[:rank]
        # On a CPU nothing waits for an answer.
        self._assumes_from = math.inf if self._device.type == "cpu" else 0
        self._is_turned = False
        self._newest: Update | Callable[[], Update] | None = None
        self.newest_squares: Squares | None = None
        # ‖Uᵀ g_b‖² and ‖g_b‖² of the samples here, when they were last measured.
        self._lengths: tuple[Tensor, Tensor] | None = None

    def update(self, grads: Tensor | FactorBatch, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads`` into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.

        Args:
            grads: Rows (B, D), or samples parameter by parameter.
            scale: Factor on all of them.
        """
        update_all([self], [grads], scale)

    @property
    def total(self) -> Total:
        """What ``look`` gives is added up over workers already."""
        return alone

    def admitted(self, grads: Tensor | FactorBatch, scale: float) -> Batch | None:
        """The samples ``scale * grads``, unless there are too few of them."""
        if isinstance(grads, Tensor):
            self._intake.check(grads)
            grads = FactorBatch.of_rows(grads, self._shapes.columns())
        self.newest_squares = None
        lengths = None
        if self.num_updates % LENGTHS_EVERY == 1:
            here = squared_lengths(grads).to(self._norms)
            lengths = scale**2 * self._shapes.total(here)[0]
        grads = self._U.prepared(grads)
        B = self._num_samples(grads)
        return Batch(grads, scale, B, lengths) if self._intake.admits(B) else None

    def look(self, batch: Batch) -> Sums:
        """Lines 4 to 8; is it finite, is it constant, did assumptions hold?"""
        B = batch.num_samples
        # (t−1)/t and 1/t; 0 and 1 at t = 1
        past, newest = self._intake.weights(self.num_updates + 1)
        s, a = past * self._norms, newest / B
        batch.seen = self._U.products(batch.grads)
        GU = batch.scale * batch.seen.GU.double() @ self._T
        V, m, VV, finite, constant = self._coordinates(GU, B)
        if batch.lengths is not None:
            self._measure(batch.lengths, GU, m, B)
        most = len(s) if past else B - 1
        core = torch.diag(s) + a * VV
        batch.sought = Sought(s, batch.scale * a * V, core, most)
        batch.turned, assumed = None, Assumed()
        # The first of few samples leave directions open: nothing is to be assumed.
        if most == len(s) and self.num_updates >= self._assumes_from:
            batch.turned = self._turned(batch, assumed)
        right = {f"right {i}": t for i, t in enumerate(assumed.was_right())}
        return {"finite": finite, "constant": constant} | right

    def act(self, batch: Batch, sums: Sums) -> Sums:  # noqa: ARG002
        """Nothing besides."""
        return {}

    def turn(self, batch: Batch, sums: Sums) -> None:
        """Lines 9 to 17."""
        is_finite, is_constant, *right = (bool(answer) for answer in sums.values())
        if not is_finite or is_constant:
            if self._intake.accepts(is_finite):  # W = 0: Y is U diag(s), and λ = s
                past, _ = self._intake.weights(self.num_updates)
                self._norms = batch.sought.s
                self._eigenvalues = past * self._eigenvalues
            return
        if batch.turned is not None and not all(right):
            batch.turned, batch.seen = None, self._U.products(batch.grads)
            self._assumes_from = self.num_updates + PATIENCE
        turned = batch.turned or self._turned(batch, bool)
        if self._intake.accepts(turned[0].is_finite):
            self._take(*turned, batch.sought.s)

    def _turned(
        self, batch: Batch, is_true: IsTrue
    ) -> tuple[Independent, Tensor, Tensor]:
        """The cut of Y Z for Z = R⁻¹, where R is that of the QR of (U T)ᵀ Y; R and Z.

        Args:
            batch: The samples, whose products with U are used up.
            is_true: What to believe of what nearly always holds.
        """
        s, V, core, most = batch.sought
        R, Z = upper_factor(core, FLOOR[self._dtype], most, is_true)
        # 9-14  Y Z = U C + Gᵀ M; the columns of V sum to zero, so that Hᵀ V = Gᵀ V
        C, M = self._T @ (s[:, None] * Z), V @ Z
        seed = self._seed + self._intake.num_updates
        grads, seen = batch.grads, batch.seen
        cut = self._U.cut(grads, seen, C, M, seed, self._total, is_true)
        return independent(cut, self._random, is_true), R, Z

    def _num_samples(self, batch: FactorBatch) -> int:
        """B, over all workers."""
        if self._total is alone:
            return len(batch)
        count = torch.full((), len(batch), dtype=torch.float64, device=self._device)
        return int(self._total(count)[0])

    def _measure(self, lengths: Tensor, GU: Tensor, m: Tensor, B: int) -> None:
        """Note what samples have inside of the span that is removed now."""
        if self._leading is not None:
            GU, m = GU @ self._leading, m @ self._leading
        if not self._is_turned:
            GU, m = torch.zeros_like(GU), torch.zeros_like(m)
        inside = GU.square().sum(1)
        self._lengths = inside, lengths
        total, inside_all = self._total(lengths.sum(), inside.sum())
        mean = m.dot(m)
        values = torch.stack(
            [total, inside_all - B * mean, torch.zeros_like(mean), mean]
        )
        self.newest_squares = Squares(B, values, has_mean=False)

    def _coordinates(
        self, GU: Tensor, B: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """V = H U T, m = Uᵀ μ and VᵀV of G U T; are samples finite, all the same?"""
        (summed,) = self._total(GU.sum(0))
        m = summed / B
        V = GU - m
        (VV,) = self._total(V.T @ V)
        finite = VV.sum().isfinite() & m.sum().isfinite()
        small = ROUNDING * torch.finfo(self._dtype).eps
        constant = VV.trace() <= small**2 * B * m.square().sum()
        return V, m, VV, finite, constant

    def _take(self, new: Independent, R: Tensor, Z: Tensor, s: Tensor) -> None:
        """Go on from new directions: λ, what is arbitrary, what is removed."""
        P = s[:, None] * Z  # new U = old U T P + of samples
        if new.fresh is not None:
            kept = (~new.fresh).double()
            R, P = kept[:, None] * R, kept * P  # Y = U R for the new U
        P = P @ new.T
        C = R.T @ new.N @ R  # YᵀY
        self._norms = C.diagonal().clamp(min=0.0).sqrt()  # 16-17  λ = ‖Y₍ⱼ₎‖
        self._arbitrary = P.T @ self._arbitrary @ P
        if new.fresh is not None:
            owed = kept[:, None] * self._arbitrary * kept
            self._arbitrary = owed + torch.diag(1 - kept)
        self._eigenvalues = self._norms[: len(self._eigenvalues)]
        if self._leading is not None:
            inside = new.T.T @ new.N @ R  # (U T)ᵀ Y
            squares, vectors = torch.linalg.eigh(inside @ inside.T)
            num = self._leading.shape[1]
            self._leading = vectors.flip(1)[:, :num].contiguous()
            self._eigenvalues = squares.flip(0)[:num].clamp(min=0.0).sqrt()
        self._note(self._U, self._T, new)
        self._U, self._T, self._N, self._is_turned = new.U, new.T, new.N, True

    def _note(self, U: Directions, T: Tensor, new: Independent) -> None:
        """Remember how far the subspace turned, and samples' lengths where known."""
        arbitrary, lengths = self._arbitrary, self._lengths

        def update() -> Update:
            squares = (T.T @ U.gram(new.U) @ new.T).square().sum(1)
            cosines = squares.sum() / (squares > 0).sum().clamp(min=1)
            unknown = torch.full_like(squares[:1], torch.nan)
            drift = (1 - cosines).clamp(min=0.0).sqrt()
            return Update(
                *(lengths or (unknown, unknown)),
                drift,
                effective_rank=_owed_to_samples(arbitrary),
            )

        # Small directions wait for somebody to ask, until the next update: not where
        # all workers would have to ask.
        waits = self.num_stored < SMALL and self._is_alone
        self._newest = update if waits else update()

    def _random(self, attempt: int = 0) -> Directions:
        """Random directions; the same for the same update, so that a run resumes."""
        seed = self._seed + self._intake.num_updates + (attempt << 40)
        random = torch.Generator(self._device).manual_seed(seed)
        K = self._intake.num_columns
        return Directions.random(self._shapes, K, random, self._dtype)

    @property
    def _is_alone(self) -> bool:
        """Whether all rows of the directions are held here."""
        return self._shapes.total is alone

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        if callable(self._newest):
            self._newest = self._newest()
        return self._newest

    @property
    def basis(self) -> Tensor:
        """Orthonormal columns with the span that is removed, written out, (D, K)."""
        T = self._T if self._leading is None else self._T @ self._leading
        return self._U.written_out() @ T.to(self._dtype)

    @property
    def eigenvalues(self) -> Tensor:
        """Column norms of Y (Algorithm 2's Λ), shape (K,); ones before any update."""
        return self._eigenvalues.clone()

    @property
    def effective_rank(self) -> float:
        """How many of the tracked directions are owed to samples and not to chance."""
        return float(_owed_to_samples(self._arbitrary))

    @property
    def num_skipped(self) -> int:
        """Intake left out: not finite, or of one sample."""
        return self._intake.num_skipped

    @property
    def num_updates(self) -> int:
        """How many batches have turned the directions."""
        return self._intake.num_updates

    @property
    def num_stored(self) -> int:
        """How many numbers the directions take."""
        return self._U.num_stored

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |(U T)ᵀ (U T) − I|; of split directions at their update."""
        N = self._U.gram(self._U) if self._is_alone else self._N
        C = self._T.T @ N @ self._T
        return float((C - torch.diag((C.diagonal() > 0).double())).abs().max())

    @own_arithmetic
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U N⁻¹ Uᵀ g for a gradient of shape (D,)."""
        filtered = gradient.to(self._dtype, copy=True)
        shapes, columns = self._shapes.thin | self._shapes.plain, self._shapes.columns()
        views = {s: filtered[columns[s]].view(shape) for s, shape in shapes.items()}
        self.project_out_(views, strength)
        return filtered.to(gradient.dtype)

    @own_arithmetic
    def project_out_(
        self, grads: Mapping[int, Tensor], strength: float | Tensor = 1.0
    ) -> Tensor:
        """The same in place, parameter by parameter; ‖U N⁻¹ Uᵀ g‖², which it had.

        A gradient that is not finite is left as it is.

        Args:
            grads: By the first column that a parameter has in the flat gradient;
                those that are missing are zero.
            strength: Multiplies what is removed.
        """
        if not (self._is_turned and grads):
            return torch.zeros((), dtype=torch.float64, device=self._device)
        T = self._T if self._leading is None else self._T @ self._leading
        x = T.T @ self._U.dot(grads)
        x = torch.where(x.isfinite().all(), x, 0.0)
        self._U.remove_(grads, strength * (T @ x))
        return x.square().sum()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a snapshot."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what is no state of such a tracker by name; nothing is changed."""
        check_small(state, self._state())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same parameters, rank and direction_rank."""
        self.check_state(state)
        self._U = self._U.with_tensors(state)
        self._N = self._U.gram(self._U)
        self._intake.load_state_dict(state)
        self._seed = int(state["seed"])
        self._T, self._norms, self._arbitrary = (
            state[name].to(self._norms, copy=True)
            for name in ("T", "norms", "arbitrary")
        )
        self._eigenvalues = self._norms[: len(self._eigenvalues)]
        if self._leading is not None:
            self._leading = state["leading"].to(self._leading, copy=True)
            self._eigenvalues = state["leading_eigenvalues"].to(self._norms, copy=True)
        self._is_turned, self._newest = self.effective_rank > 0, None
        self._lengths = self.newest_squares = None

    def entries_by_parameter(self) -> dict[str, list[int]]:
        """Entries of a state that hold rows of some parameters, and which these are."""
        places = {start: place for place, start in enumerate(self._shapes.cuts)}
        entries = {"plain": [places[start] for start in self._shapes.plain]}
        thin = enumerate(self._shapes.thin)
        return entries | {f"left_{i}": [places[start]] for i, start in thin}

    def _state(self) -> dict[str, Tensor]:
        state = self._U.tensors
        state |= {"T": self._T, "norms": self._norms, "arbitrary": self._arbitrary}
        state["seed"] = torch.tensor(self._seed)
        if self._leading is not None:
            state["leading"] = self._leading
            state["leading_eigenvalues"] = self._eigenvalues
        return state | self._intake.state_dict()


def _owed_to_samples(arbitrary: Tensor) -> Tensor:
    """How many directions are owed to samples and not to chance, a scalar.

    Args:
        arbitrary: NᵀN, see ``LowRankPower``, shape (K, K).
    """
    K = len(arbitrary)
    return K - arbitrary.trace().clamp(0.0, K)
