"""U = S Q: the one owner of a tall matrix that is overwritten again and again.

Shapes: U (D, K), S (D, K) stored, Q (K, K) small, on the host; G (B, D) samples, H the
same centred, P (K, K), M (B, K).

To form U ← U P + Hᵀ M takes 2 D K² flops to turn all the columns, for the sake of B
samples. But

    U P + Hᵀ M  =  (S + Hᵀ M (Q P)⁻¹) Q P

so that S takes the samples in, 2 D B K flops, and Q ← Q P the turn. What rounding does
to S counts in U by as much as Q magnifies it. Before that is too much, U is multiplied
out: S ← U and Q ← 1. Only sums over the D rows leave this file: workers that hold some
rows each add theirs up, and all go on with the same numbers.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dome.torch_private import own_arithmetic
from dome.trackers import linalg
from dome.trackers.linalg import Shard
from dome.trackers.parts import Part, parts_of, pieces

STORAGE = (torch.float32, torch.float64, torch.bfloat16)
MOST_MAGNIFIED = 4.0  # two bits: by how much rounding in S may count in U
LONGEST = 1e6  # columns of S, where those of U are of length one
# Rows for each column from which Q⁻¹, about 2 K³ flops, costs little against U P.
TALL = 32
CHECK_EVERY = 100  # updates between two measurements of |UᵀU − I|, a hundredth of them
CHECK_EVERY_16_BIT = 10
CONVERGING = 1e-3  # error from which the next sweep leaves nothing but rounding
FILLED_ROWS = 4096  # drawn at a time; another number would be other directions
HELD = "held_rows"  # in a state, in the place of "basis": the rows held here alone
NOT_ORTHONORMAL = 0.1  # |UᵀU − I| that no storage format explains
DAMAGED = "the file is damaged, or not a state of a tracker; go back to an older one"


def may_be_factored(dim: int, num_columns: int, itemsize: int) -> bool:
    """Whether a U (D, K) is kept factored; 16 bits have none to lose by magnifying."""
    return dim >= TALL * num_columns and itemsize >= torch.float32.itemsize


def check_storage(dtype: object) -> None:
    """Refuse a precision in which no basis is stored."""
    if dtype not in STORAGE:
        raise ValueError(f"dtype must be one of {STORAGE}, got {dtype!r}")


class Turn(NamedTuple):
    """Q P for an update U ← U P + Hᵀ M, and its inverse; None: U is multiplied out."""

    Q: Tensor
    inverse: Tensor | None


class FactoredBasis:
    """U in its storage format.

    Args:
        shard: Which of the D rows are held here.
        num_columns: K.
        dtype: Storage format; products are formed in float32 at least.
        device: Where S lives.
        seed: Of the random directions that fill up what samples leave open.
        factored: Whether Q may be other than 1.
    """

    def __init__(
        self,
        shard: Shard,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        seed: int,
        *,
        factored: bool = True,
    ) -> None:
        check_storage(dtype)
        self._S = torch.zeros(shard.num_rows, num_columns, dtype=dtype, device=device)
        self._Q: Tensor | None = None
        # The words of the newest batch; nothing if it was not of words, or of a device.
        self._newest: tuple[Part, ...] = ()
        self.shard, self.num_columns, self.seed = shard, num_columns, seed
        self.dtype, self.device = dtype, self._S.device
        self.compute_dtype = linalg.compute_dtype(dtype)  # of products
        self.error = 0.0  # largest entry of |UᵀU − I| when it was last measured
        sixteen = dtype.itemsize < torch.float32.itemsize
        self._check_every = CHECK_EVERY_16_BIT if sixteen else CHECK_EVERY
        # The same for all workers: a checkpoint puts their rows together.
        self._may_factor = factored and may_be_factored(
            shard.dim, num_columns, dtype.itemsize
        )

    def there(self, small: Tensor) -> Tensor:
        """A small matrix where S is; nothing waits for it."""
        return small.to(self.device, non_blocking=True)

    @property
    def matrix(self) -> Tensor:
        """U (D, K), the rows held here; a copy if it is factored, else a view."""
        return self._S if self._Q is None else self._combined(self._Q)

    def times(self, X: Tensor) -> Tensor:
        """U X for a small matrix (K, n), in the storage format, shape (D, n)."""
        return self._combined(X if self._Q is None else self._Q @ X)

    def inner(self, G: Sequence[Part]) -> Tensor:
        """G U for rows (B, D): a sum over the rows held here, float64, shape (B, K)."""
        GS = self._inner_of_stored(G)
        return GS if self._Q is None else GS @ self.there(self._Q)

    def _inner_of_stored(self, G: Sequence[Part]) -> Tensor:
        """G S, float64, shape (B, K)."""
        GS = self._S.new_zeros(len(G[0].rows), self.num_columns, dtype=torch.float64)
        for part in pieces(G, linalg.block_rows(sum(GS.shape), self.device)):
            GS += linalg.product(part.rows, part.of(self._S))
        return GS

    def outside(self, G: Sequence[Part], V: Tensor) -> tuple[Tensor, Tensor]:
        """What centred rows have outside U, formed explicitly, block by block.

            H⊥ = H − V Uᵀ,  returns  H⊥ U  and  H⊥ H⊥ᵀ

        The first is zero up to rounding and to the basis' own error, and corrects for
        both. Differences of the finished products, H Hᵀ − V Vᵀ, would have no correct
        digit left where the basis holds nearly all of H.

        Args:
            G: Rows, perhaps not centred, shape (B, D), in parts.
            V: H U, shape (B, K).
        """
        S, Q, dtype = self._S, self._Q, self.compute_dtype
        correction, inner = torch.zeros_like(V), V.new_zeros(len(V), len(V))
        coords = (V if Q is None else V @ self.there(Q.T)).to(dtype)
        num = linalg.block_rows(sum(V.shape), self.device)
        for part in pieces(G, num):
            columns, rest = part.of(S).to(dtype), part.rows.to(dtype)
            rest = rest - rest.mean(dim=0)
            rest.addmm_(coords, columns.T, alpha=-1)
            correction += rest @ columns
            inner += rest @ rest.T
        # Where all samples are zero, H⊥ = −V Uᵀ.
        for columns in chain.from_iterable(part.others(S, num) for part in G):
            C, wide = linalg.gram(columns), coords.to(torch.float64)
            correction -= wide @ C
            inner += wide @ C @ wide.T
        return correction if Q is None else correction @ self.there(Q), inner

    def turn(self, P: Tensor) -> Turn:
        """What U ← U P + Hᵀ M would do to Q; nothing is changed."""
        Q = P if self._Q is None else self._Q @ P
        if not self._may_factor:
            return Turn(Q, None)
        inverse, info = torch.linalg.inv_ex(Q)
        # U has columns of length one, S = U Q⁻¹ those of Q⁻¹. Each of them is rounded
        # relative to its own length, so that only Q's turns magnify, not its scales.
        squared = inverse.square().sum(dim=0)
        is_small = (squared @ Q.square()).amax() <= MOST_MAGNIFIED**2
        is_good = is_small and squared.amax() <= LONGEST**2 and info == 0
        return Turn(Q, inverse if is_good else None)

    def turn_(self, turn: Turn, wide: Sequence[Part], small: Tensor) -> None:
        """U ← U P + wideᵀ small, for wide (n, D) in parts and small (n, K)."""
        on_host = self.device.type == "cpu" and any(p.words is not None for p in wide)
        self._newest = tuple(part.without_rows() for part in wide) if on_host else ()
        if turn.inverse is None:
            self._recombine_(turn.Q, wide, small)
            self._Q = None
            return
        small = self.there(small @ turn.inverse).to(self.compute_dtype)
        for part in pieces(wide, linalg.block_rows(sum(small.shape), self.device)):
            rows = part.of(self._S).addmm_(part.rows.to(small.dtype).T, small)
            if part.words is not None:
                part.put(self._S, rows)
        # As it comes out of a file: products round in an order that strides decide.
        self._Q = turn.Q.contiguous()

    def project_out(
        self, gradient: Tensor, chosen: Tensor | None, strength: float
    ) -> Tensor:
        """g − strength · U Uᵀ g for a gradient (D,), the numbers held here.

        Args:
            gradient: g, shape (n,).
            chosen: Orthonormal columns: U ``chosen`` is removed, (K, n); None for U.
            strength: How much to remove, in [0, 1].
        """
        if gradient.shape != (len(self._S),):
            raise ValueError(
                f"gradient must have shape ({len(self._S)},), got "
                f"{tuple(gradient.shape)}"
            )
        S, dtype = self._S, self.compute_dtype
        (c,) = self.shard.total(self._inner_of_stored(self._without_zeros(gradient))[0])
        for W in (self._Q, chosen):
            c = c if W is None else c @ self.there(W)
        for W in (chosen, self._Q):
            c = c if W is None else self.there(W) @ c
        c = (strength * c).to(dtype)
        if gradient.dtype == S.dtype:
            return linalg.subtract_combination(gradient, S, c)
        result = gradient.clone()
        num = linalg.block_rows(self.num_columns, self.device)
        for part, rows in zip(result.split(num), S.split(num), strict=True):
            part.sub_(rows.to(dtype) @ c)
        return result

    def _without_zeros(self, gradient: Tensor) -> Sequence[Part]:
        """A gradient as one row, of the newest words alone if it is zero in others.

        A mean of the samples is. A penalty, or an optimizer that adds to gradients,
        may have left something there. A device would have to be waited for.
        """
        row = gradient[None]
        # Used once: a run that goes on and one that resumes must add up alike.
        parts = [part.chosen_from(row) for part in self._newest]
        self._newest = ()
        ours = sum(int(part.rows.count_nonzero()) for part in parts)
        if parts and ours == int(row.count_nonzero()):
            return parts
        return parts_of(row)

    def gram_if_due(self, num_updates: int) -> Tensor | None:
        """UᵀU now and then, to be added up over workers and measured, (K, K)."""
        is_due = num_updates > 0 and num_updates % self._check_every == 0
        return self._gram() if is_due else None

    def is_lost(self, C: Tensor) -> bool:
        """Whether UᵀU, which is remembered, is off by more than rounding."""
        # Columns that the data has not reached yet are zero.
        self.error = float((C - torch.diag((C.diagonal() > 0).to(C))).abs().max())
        return self.error > self._limit

    @own_arithmetic
    def orthonormalize_(
        self,
        number: int,
        fill: Tensor,
        num_columns: int | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        """Make the first columns orthonormal, through repeated Cholesky QR.

        Cholesky QR loses twice the digits that Householder QR loses, so it is repeated
        until nothing is left to gain. Columns to fill, and any that depend on the
        others, become random directions orthogonal to the rest; the others keep the
        span they had, in order.

        Args:
            number: The update's, which decides the random directions: a resumed run
                draws the same.
            fill: Mask of columns to be replaced by random ones, shape (K,).
            num_columns: How many columns there are, if not all; the others are zero.
            seed: In the place of the basis' own.
        """
        seed = (self.seed if seed is None else seed) + number
        generator = torch.Generator(self.device).manual_seed(seed)
        self.write_()
        n = self.num_columns if num_columns is None else num_columns
        fill, in_doubt = fill[:n], bool(fill.any())
        for _ in range(10):
            if fill.any():
                self._fill_(fill, generator)
            if in_doubt:
                P, fill = linalg.sweep(self._total_gram(n), fill)
                self._recombine_(P)
            C = self._total_gram(n)
            left, in_doubt = _error(C), True
            if not fill.any() and left <= self._limit:
                break
            # Sweeps converge quadratically, once they do: one more leaves rounding.
            if not fill.any() and left < CONVERGING and left * n < 0.5:
                self._recombine_(linalg.inverse_cholesky(C)[0])
                C = self._total_gram(n)
                break
        self.error = _error(C)

    def write_(self, columns: Tensor | None = None) -> None:
        """Multiply U out, or take other columns (D, K)."""
        if columns is not None:
            self._S.copy_(columns)
        elif self._Q is not None:
            self._recombine_(self._Q)
        self._Q = None

    def _combined(self, X: Tensor) -> Tensor:
        """S X, shape (D, n)."""
        X = self.there(X).to(self.compute_dtype)
        result = self._S.new_empty(len(self._S), X.shape[1])
        num = linalg.block_rows(self.num_columns, self.device)
        for part, rows in zip(result.split(num), self._S.split(num), strict=True):
            part.copy_(rows.to(X.dtype) @ X)
        return result

    def _recombine_(
        self, P: Tensor, wide: Sequence[Part] = (), small: Tensor | None = None
    ) -> None:
        """S ← S P + wideᵀ small in place; P may be of the first columns alone."""
        dtype, S = self.compute_dtype, self._S[:, : len(P)]
        num = linalg.block_rows(2 * len(P), self.device)
        P = self.there(P).to(dtype)
        small = None if small is None else self.there(small).to(dtype)
        for part in wide or [Part(S.new_empty(0, len(S)), slice(0, len(S)))]:
            turned = []
            for piece in pieces([part], num):
                rows = piece.of(S).to(dtype) @ P
                if small is not None:
                    rows.addmm_(piece.rows.to(dtype).T, small)
                if part.words is None:
                    piece.put(S, rows)
                else:  # the others are turned first
                    turned.append((piece, rows))
            if part.words is not None:
                for rows in S[part.columns].split(num):
                    rows.copy_(rows.to(dtype) @ P)
            for piece, rows in turned:
                piece.put(S, rows)

    def _gram(self, num_columns: int | None = None) -> Tensor:
        """UᵀU of the rows held here, shape (K, K)."""
        C = linalg.gram(self._S[:, :num_columns])
        if self._Q is None:
            return C
        Q = self.there(self._Q)
        return Q.T @ C @ Q

    def _total_gram(self, num_columns: int) -> Tensor:
        """UᵀU of all rows, on the host. Workers send each other its upper half."""
        C = self._gram(num_columns)
        i, j = torch.triu_indices(*C.shape, device=C.device)
        (half,) = self.shard.total(C[i, j])
        C[i, j] = C[j, i] = half
        return C.cpu()

    def _fill_(self, fill: Tensor, generator: torch.Generator) -> None:
        """Random columns; a shard draws those of all rows and keeps its own.

        So the directions are the same for any number of workers. A generator cannot be
        moved ahead on every device: that each draws D numbers a column is the price.
        """
        index, dim = self.there(fill.nonzero()[:, 0]), self.shard.dim
        starts = range(0, dim, FILLED_ROWS)
        blocks = (slice(i, min(i + FILLED_ROWS, dim)) for i in starts)
        for rows, meetings in self.shard.meet(blocks):
            noise = torch.randn(
                rows.stop - rows.start,
                len(index),
                generator=generator,
                device=self.device,
                dtype=self.compute_dtype,
            )
            for drawn, here in meetings:
                self._S[here, index] = (noise[drawn] / dim**0.5).to(self.dtype)

    @property
    def _limit(self) -> float:
        """How small |UᵀU − I| can be expected to be."""
        eps = torch.finfo(self.dtype).eps
        if self.compute_dtype == self.dtype:
            return 4 * eps
        # Rounding to 16 bits perturbs every entry by itself: errors add up as a random
        # walk.
        return 2 * eps / self.shard.dim**0.5

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of all D rows of S, those of other workers too, and of Q."""
        self._newest = ()  # which is not in a state
        no_Q = torch.empty(0, self.num_columns, dtype=torch.float64)
        S = self.shard.collect(self._S)
        return {
            "basis": S.clone() if S is self._S else S,
            "Q": no_Q if self._Q is None else self._Q.clone(),
        } | self.small_state()

    def small_state(self) -> dict[str, Tensor]:
        """What its upkeep depends on."""
        return {
            "seed": torch.tensor(self.seed),
            "orthogonality_error": torch.tensor(self.error, dtype=torch.float64),
        }

    @own_arithmetic
    def check_state(self, state: Mapping[str, Tensor], required: Tensor) -> None:
        """Refuse a state of another shape or storage, or that is no basis.

        Args:
            state: What is to be loaded.
            required: Mask of the columns that must not be zero, shape (K,).
        """
        is_whole = HELD not in state
        name = "basis" if is_whole else HELD
        for entry in (name, "Q"):
            if not isinstance(state.get(entry), Tensor):
                raise ValueError(
                    f"the state has no {entry!r}: it was written by another tracker, "
                    f"use the same tracker and oversample"
                )
        S, Q = state[name], state["Q"]
        self._check_shapes(S, Q, self.shard.dim if is_whole else self.shard.num_rows)
        C = linalg.gram(S)
        (C,) = (C,) if is_whole else self.shard.total(C)
        C = Q.to(C).T @ C @ Q.to(C) if len(Q) else C
        present = (C.diagonal() > 0) | required.to(C.device)
        error = float((C - torch.diag(present.to(C.dtype))).abs().max())
        if not error <= NOT_ORTHONORMAL:
            raise ValueError(
                f"the saved basis is not orthonormal, |UᵀU − I| = {error:.2g}: "
                f"{DAMAGED}"
            )

    def _check_shapes(self, S: Tensor, Q: Tensor, num_rows: int) -> None:
        shape, K = (num_rows, self.num_columns), self.num_columns
        if S.shape != shape:
            raise ValueError(
                f"the saved basis has shape {tuple(S.shape)}, this one {shape}: it "
                f"tracks {S.shape[-1]} directions in the checkpoint and {shape[1]} "
                f"here, use the same model, rank and oversample"
            )
        if S.dtype != self.dtype:
            raise ValueError(
                f"the saved basis is stored as {S.dtype}, this one as {self.dtype}: "
                f"use the same basis_dtype, it cannot be resumed bit for bit otherwise"
            )
        if Q.dtype != torch.float64:
            raise ValueError(
                f"the saved Q is stored as {Q.dtype}, not as torch.float64: {DAMAGED}"
            )
        if Q.shape not in ((0, K), (K, K)):
            raise ValueError(
                f"the saved Q has shape {tuple(Q.shape)}, a basis of {K} columns has "
                f"none or a square one: it was written by an older version of dome, "
                f"finish that run with it"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of the same shape and storage back."""
        held = state[HELD] if HELD in state else self.shard.held_of(state["basis"])
        self._S.copy_(held)
        Q = state["Q"]
        self._Q = Q.to("cpu", copy=True) if len(Q) else None
        self.seed = int(state["seed"])
        self.error = float(state["orthogonality_error"])


def _error(C: Tensor) -> float:
    """Largest entry of |C − I|."""
    return float((C - torch.eye(len(C), dtype=C.dtype)).abs().max())
