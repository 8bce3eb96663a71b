"""Algorithm 2 with directions of low rank, for models whose D × K does not fit.

Shapes: G (B, D) samples, H = G − mean, U (D, K) directions, each of rank r in every
weight matrix (``dome.numerics.thin``), of length one but not orthogonal. With N = UᵀU
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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.numerics.factors import FactorBatch
from dome.numerics.orthonormal import DEPENDENT, gram_schmidt, inverse_cholesky, sweep
from dome.numerics.shard import Total, alone
from dome.numerics.thin import (
    Columns,
    Thin,
    filled,
    is_thin,
    orthonormal_turns,
    own_grams,
    turned,
)
from dome.trackers.intake import Intake
from dome.trackers.protocol import Update
from dome.trackers.states import check_small, draw_seed

# Squared share that a column of (U T)ᵀ Y has of its own, below which it is rounding;
# the same of r columns of a weight; ‖V‖ over the mean's, below which V is rounding.
FLOOR = {torch.float32: 1e-10, torch.float64: 1e-13}
THIN_FLOOR = {torch.float32: 1e-9, torch.float64: 1e-18}
ROUNDING = 16
ATTEMPTS = 8  # to find random directions that do not depend on others

Pieces = dict[int, Columns | Thin]


@dataclass(frozen=True, slots=True)
class Turned:
    """What an update makes of U.

    Attributes:
        pieces: The new directions, of length one.
        lengths: What they had before, shape (K,); 1 for random ones.
        N: Their Gram matrix, shape (K, K).
        T: What makes them orthonormal, shape (K, K).
        fresh: Mask of those that are random, shape (K,).
        is_finite: Whether the combination of samples was.
    """

    pieces: Pieces
    lengths: Tensor
    N: Tensor
    T: Tensor
    fresh: Tensor
    is_finite: bool


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
    ) -> None:
        if direction_rank < 1:
            raise ValueError(f"direction_rank must be at least 1, got {direction_rank}")
        if dtype not in FLOOR:
            raise ValueError(
                f"directions of low rank are stored in torch.float32 or torch.float64, "
                f"got {dtype}: leave basis_dtype out"
            )
        self._shapes = [torch.Size(shape) for shape in shapes]
        self._dim = sum(shape.numel() for shape in self._shapes)
        self._intake = Intake(self._dim, rank, oversample, forget, None)
        self._direction_rank, self._total = direction_rank, total
        self._dtype, self._device = dtype, torch.device(device or "cpu")
        self._seed = draw_seed(generator)
        K = self._intake.num_columns
        eye = torch.eye(K, dtype=torch.float64, device=device)
        start = self._of_length_one(self._random(0), eye[0] < 0)
        self._pieces, self._T = start.pieces, start.T
        self._norms = torch.ones(K, dtype=torch.float64, device=device)
        # NᵀN where U T = (data) + A N, of arbitrary directions A.
        self._arbitrary = eye.clone()
        self._leading = eye[:, :rank].clone() if rank < K else None
        self._eigenvalues = self._norms[:rank]
        self._is_turned = False
        self._newest: Update | None = None

    @torch.no_grad()
    def update(self, grads: Tensor | FactorBatch, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads`` into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.

        Args:
            grads: Rows (B, D), or samples parameter by parameter.
            scale: Factor on all of them.
        """
        batch = grads
        if isinstance(batch, Tensor):
            self._intake.check(batch)
            batch = FactorBatch.of_rows(batch, list(self._columns()))
        count = torch.full((), float(len(batch)), dtype=torch.float64)
        (count,) = self._total(count.to(self._device))
        B = int(count)
        if not self._intake.admits(B):
            return
        past, newest = self._intake.weights()  # (t−1)/t and 1/t; 0 and 1 at t = 1
        s, a = past * self._norms, newest / B
        V, m, kept = self._coordinates(batch, scale, B)  # 4-8   V = H U T
        (VV,) = self._total(V.T @ V)
        core = torch.diag(s) + a * VV  # (U T)ᵀ Y
        finite = VV.sum().isfinite() & m.sum().isfinite()
        small = ROUNDING * torch.finfo(self._dtype).eps
        constant = VV.trace() <= small**2 * B * m.square().sum()
        is_finite, is_constant = torch.stack([finite, constant]).tolist()
        if not is_finite or is_constant:
            if not self._intake.accepts(is_finite):
                return
            # W = 0: Y has the columns of U, and λ = s
            self._norms, self._eigenvalues = s, past * self._eigenvalues
            return
        most = len(s) if past else B - 1
        R, Z, is_open = upper_factor(core, FLOOR[self._dtype], most)
        # 9-14  Y Z = U C + Gᵀ M; the columns of V sum to zero, so that Hᵀ V = Gᵀ V
        C, M = self._T @ (s[:, None] * Z), scale * a * V @ Z
        new = self._cut(batch, kept, C, M, is_open)
        if self._intake.accepts(new.is_finite):
            self._take(new, s, R, Z)

    def _coordinates(
        self, batch: FactorBatch, scale: float, B: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """V = H U T, shape (B, K), and μᵀ U T, in float64; right products kept."""
        K = len(self._norms)
        out = torch.zeros(len(batch), K, dtype=self._dtype, device=self._device)
        kept: dict[int, Tensor] = {}
        for start, piece in self._pieces.items():
            piece.coordinates(batch.of(start), out, kept)
        GU = scale * out.double() @ self._T
        (summed,) = self._total(GU.sum(0))
        return GU - summed / B, summed / B, kept

    def _cut(
        self,
        batch: FactorBatch,
        kept: dict[int, Tensor],
        C: Tensor,
        M: Tensor,
        is_open: Tensor,
    ) -> Turned:
        """U C + Gᵀ M, brought to rank r by one step of a power iteration."""
        C, M = C.to(self._dtype), M.to(self._dtype)
        thin = {s: p for s, p in self._pieces.items() if isinstance(p, Thin)}
        rows = {s: p.of_rows(M, batch.of(s)) for s, p in thin.items()}
        summed = self._total(
            *(p.left_products(M, batch.of(s), kept, rows[s]) for s, p in thin.items())
        )
        lefts = self._orthonormal(
            [x + p.past_left(C) for x, p in zip(summed, thin.values(), strict=True)]
        )
        new: Pieces = dict(self._pieces)  # keeps the order
        rights = self._total(
            *(
                p.right_products(P, M, batch.of(s), rows[s])
                for (s, p), P in zip(thin.items(), lefts, strict=True)
            )
        )
        for (s, p), P, Q in zip(thin.items(), lefts, rights, strict=True):
            new[s] = Thin(P, Q + p.past_right(C, P), p.num)
        plain = {s: p for s, p in self._pieces.items() if isinstance(p, Columns)}
        added = self._total(*(p.combination(M, batch.of(s)) for s, p in plain.items()))
        for (s, columns), U in zip(plain.items(), added, strict=True):
            new[s] = Columns(U + columns.U @ C)
        return self._of_length_one(new, is_open)

    def _orthonormal(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthonormal columns with the span of each direction in each weight."""
        if not stacks:
            return []
        K, floor = len(self._norms), THIN_FLOOR[self._dtype]
        grams = torch.stack([own_grams(X, K) for X in stacks])
        turns, num_missing = orthonormal_turns(grams.nan_to_num(0.0), floor)
        found = [turned(X, turn) for X, turn in zip(stacks, turns, strict=True)]
        if num_missing.item():
            random = self._generator(self._intake.num_updates)
            found = [filled(P, K, floor, random) for P in found]
        return found

    def _of_length_one(self, pieces: Pieces, is_open: Tensor) -> Turned:
        """Directions of length one; random ones where they are open or dependent."""
        N = self._gram(pieces, pieces)
        lengths = N.diagonal().clamp(min=0.0).sqrt()
        is_there = ~is_open & (lengths > 0)
        lengths = torch.where(is_there, lengths, 1.0)
        factors = is_there / lengths
        N = N * factors * factors[:, None]
        T, own = inverse_cholesky(N)
        asked = torch.stack([own.min(), N.sum().isfinite()])
        least, is_finite = asked.tolist()
        if is_finite and least <= DEPENDENT:
            return self._filled(pieces, lengths, factors, N)
        pieces = {start: piece.scaled(factors) for start, piece in pieces.items()}
        return Turned(pieces, lengths, N, T, torch.zeros_like(is_open), bool(is_finite))

    def _filled(
        self, pieces: Pieces, lengths: Tensor, factors: Tensor, N: Tensor
    ) -> Turned:
        """Random directions for those that are zero or depend on others."""
        fresh = factors == 0
        T, missing = sweep(N, fresh)
        for attempt in range(ATTEMPTS):
            fresh = fresh | missing
            noise = self._random(self._intake.num_updates, attempt)
            pieces = {
                start: _mixed(piece, noise[start], factors, missing)
                for start, piece in pieces.items()
            }
            N = self._gram(pieces, pieces)
            factors = N.diagonal().rsqrt()
            N = N * factors * factors[:, None]
            # Behind the others, which keep the span that they had, in order.
            T, missing = sweep(N, fresh)
            if not missing.any():
                break
        pieces = {start: piece.scaled(factors) for start, piece in pieces.items()}
        lengths = torch.where(fresh, 1.0, lengths)
        return Turned(pieces, lengths, N, T, fresh, True)

    def _take(self, new: Turned, s: Tensor, R: Tensor, Z: Tensor) -> None:
        """Go on from new directions: λ, what is arbitrary, what is removed."""
        kept = (~new.fresh).double()
        DR = (kept * new.lengths)[:, None] * R  # Y = U D R for the new U
        C = DR.T @ new.N @ DR  # YᵀY
        self._norms = C.diagonal().clamp(min=0.0).sqrt()  # 16-17  λ = ‖Y₍ⱼ₎‖
        P = s[:, None] * Z * (kept / new.lengths) @ new.T
        owed = kept[:, None] * (P.T @ self._arbitrary @ P) * kept
        self._arbitrary = owed + torch.diag(1 - kept)
        self._eigenvalues = self._norms[: len(self._eigenvalues)]
        if self._leading is not None:
            inside = new.T.T @ new.N @ DR  # (U T)ᵀ Y
            squares, vectors = torch.linalg.eigh(inside @ inside.T)
            num = self._leading.shape[1]
            self._leading = vectors.flip(1)[:, :num].contiguous()
            self._eigenvalues = squares.flip(0)[:num].clamp(min=0.0).sqrt()
        turn = self._T.T @ self._gram(self._pieces, new.pieces) @ new.T
        self._pieces, self._T, self._is_turned = new.pieces, new.T, True
        self._note(turn)

    def _note(self, turn: Tensor) -> None:
        """Remember how far the subspace turned; norms of samples are not known."""
        squares = turn.square().sum(1)
        cosines = squares.sum() / (squares > 0).sum().clamp(min=1)
        unknown = torch.full((1,), torch.nan, dtype=torch.float64, device=self._device)
        self._newest = Update(
            captured=unknown,
            total=unknown,
            drift=(1 - cosines).clamp(min=0.0).sqrt(),
            effective_rank=self._rank(),
        )

    def _gram(self, some: Pieces, others: Pieces) -> Tensor:
        """Uᵀ W of two sets of directions, float64, shape (K, K)."""
        grams = [gram_of(piece, others[start]) for start, piece in some.items()]
        return torch.stack(grams).double().sum(0)

    def _random(self, num_updates: int, attempt: int = 0) -> Pieces:
        """Random directions of length one, about; the same for the same update."""
        random = self._generator(num_updates, attempt)
        K, r, D = self._intake.num_columns, self._direction_rank, self._dim

        def noise(rows: int, width: int, scale: float) -> Tensor:
            drawn = torch.randn(
                (rows, width),
                generator=random,
                dtype=self._dtype,
                device=self._device,
            )
            return drawn.mul_(scale)

        pieces: Pieces = {}
        for (start, _), shape in zip(self._columns(), self._shapes, strict=True):
            if is_thin(shape, r):
                P = noise(shape[0], K * r, 1.0)
                Q = noise(shape[1:].numel(), K * r, (r * D) ** -0.5)
                pieces[start] = Thin(P, Q, K)
            else:
                pieces[start] = Columns(noise(shape.numel(), K, D**-0.5))
        return pieces

    def _generator(self, num_updates: int, attempt: int = 0) -> torch.Generator:
        # Seeded by the update's number, so that a resumed run draws the same ones.
        seed = self._seed + num_updates + (attempt << 40)
        return torch.Generator(self._device).manual_seed(seed)

    def _columns(self) -> Iterator[tuple[int, int]]:
        """First and last column of each parameter in the flat gradient."""
        start = 0
        for shape in self._shapes:
            yield start, start + shape.numel()
            start += shape.numel()

    def _rank(self) -> Tensor:
        """How many directions are owed to samples and not to chance, a scalar."""
        K = len(self._norms)
        return K - self._arbitrary.trace().clamp(0.0, K)

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        return self._newest

    @property
    def basis(self) -> Tensor:
        """Orthonormal columns with the span that is removed, written out, (D, K)."""
        T = self._T if self._leading is None else self._T @ self._leading
        U = torch.cat([piece.written_out() for piece in self._pieces.values()])
        return U @ T.to(U.dtype)

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
    def num_updates(self) -> int:
        """How many batches have turned the directions."""
        return self._intake.num_updates

    @property
    def num_stored(self) -> int:
        """How many numbers the directions take."""
        return sum(
            tensor.numel()
            for piece in self._pieces.values()
            for tensor in piece.tensors.values()
        )

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |(U T)ᵀ (U T) − I|."""
        C = self._T.T @ self._gram(self._pieces, self._pieces) @ self._T
        return float((C - torch.diag((C.diagonal() > 0).double())).abs().max())

    @torch.no_grad()
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U N⁻¹ Uᵀ g for a gradient of shape (D,)."""
        filtered = gradient.to(self._dtype, copy=True)
        views = {
            start: filtered[start:stop].view(shape)
            for (start, stop), shape in zip(self._columns(), self._shapes, strict=True)
        }
        self.project_out_(views, strength)
        return filtered.to(gradient.dtype)

    @torch.no_grad()
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
        there = [(piece, grads[s]) for s, piece in self._pieces.items() if s in grads]
        if not (self._is_turned and there):
            return torch.zeros((), dtype=torch.float64, device=self._device)
        dots = torch.stack([piece.dot(g) for piece, g in there]).double().sum(0)
        T = self._T if self._leading is None else self._T @ self._leading
        x = T.T @ dots
        x = torch.where(x.isfinite().all(), x, 0.0)
        c = (strength * (T @ x)).to(self._dtype)
        for piece, g in there:
            piece.remove_(g, c)
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
        pieces: Pieces = {}
        for i, (start, piece) in enumerate(self._pieces.items()):
            stored = {
                name: state[f"{name}_{i}"].to(tensor, copy=True)
                for name, tensor in piece.tensors.items()
            }
            if isinstance(piece, Thin):
                pieces[start] = Thin(stored["left"], stored["right"], piece.num)
            else:
                pieces[start] = Columns(stored["columns"])
        self._pieces = pieces
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

    def _state(self) -> dict[str, Tensor]:
        state = {
            f"{name}_{i}": tensor
            for i, piece in enumerate(self._pieces.values())
            for name, tensor in piece.tensors.items()
        }
        state |= {"T": self._T, "norms": self._norms, "arbitrary": self._arbitrary}
        state["seed"] = torch.tensor(self._seed)
        if self._leading is not None:
            state["leading"] = self._leading
            state["leading_eigenvalues"] = self._eigenvalues
        return state | self._intake.state_dict()


def upper_factor(
    core: Tensor, floor: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """R of core = Q R with positive diagonal, its inverse, and open columns.

    Args:
        core: Symmetric, float64, shape (K, K).
        floor: Squared share that a column must have of its own.
        most: How many directions there can be.

    Returns:
        R, zero in the rows of columns that depend on earlier ones; R⁻¹, zero in their
        columns; and a mask of them.
    """
    _, R = torch.linalg.qr(core)
    R = R * R.diagonal().sign()[:, None]
    own = (R.diagonal() / torch.linalg.vector_norm(core, dim=0)).square()
    if most >= len(core) and bool((own > floor).all()):
        eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
        inverse = torch.linalg.solve_triangular(R, eye, upper=True)
        return R, inverse, torch.zeros_like(own, dtype=torch.bool)
    # Through squares of the columns' lengths, which must not leave the range.
    size = torch.linalg.matrix_norm(core)
    size = torch.where(size > 0, size, 1.0)
    unit = core / size
    squared = unit @ unit
    inverse, own = gram_schmidt(squared, floor, most)
    return inverse.T @ squared * size, inverse / size, own <= floor


def gram_of(some: Columns | Thin, other: Columns | Thin) -> Tensor:
    """Uᵀ W of the directions of one parameter, shape (K, K)."""
    if isinstance(some, Thin) and isinstance(other, Thin):
        return some.gram(other)
    if isinstance(some, Columns) and isinstance(other, Columns):
        return some.gram(other)
    raise TypeError("directions of one parameter are stored in one way")


def _mixed(
    piece: Columns | Thin, noise: Columns | Thin, factors: Tensor, missing: Tensor
) -> Columns | Thin:
    """Directions times factors, and noise in place of those that are missing."""
    piece = piece.scaled(factors)
    if isinstance(piece, Thin) and isinstance(noise, Thin):
        wide = missing.repeat_interleave(piece.rank)
        P, Q = torch.where(wide, noise.P, piece.P), torch.where(wide, noise.Q, piece.Q)
        return Thin(P, Q, piece.num)
    if isinstance(piece, Columns) and isinstance(noise, Columns):
        return Columns(torch.where(missing, noise.U, piece.U))
    raise TypeError("directions of one parameter are stored in one way")
