"""U = S Q: the one owner of a tall matrix that is overwritten again and again.

Shapes: U (D, K), S (D, K) stored, Q (K, K) small, G (B, D) samples, H the same centred,
P (K, K), M (B, K).

To form U ← U P + Hᵀ M takes 2 D K² flops to turn all the columns, for the sake of B
samples. But

    U P + Hᵀ M  =  (S + Hᵀ M (Q P)⁻¹) Q P

so that S takes the samples in, 2 D B K flops, and Q ← Q P the turn: U is *factored*.
What rounding does to S counts in U by as much as Q magnifies it. Before that is too
much, U is multiplied out: S ← U and Q ← 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.numerics import passes
from dome.numerics.arithmetic import own_arithmetic
from dome.numerics.orthonormal import orthogonality_limit, orthonormalize_
from dome.numerics.passes import compute_dtype
from dome.numerics.products import Products, Rows, Samples
from dome.numerics.shard import Shard
from dome.numerics.together import Small, Steps, Sum

STORAGE = (torch.float32, torch.float64, torch.bfloat16)
MOST_MAGNIFIED = 4.0  # two bits: by how much rounding in S may count in U
LONGEST = 1e6  # columns of S, where those of U are of length one
# Rows for each column from which Q⁻¹, about 2 K³ flops, costs little against U P.
TALL = 32
HELD = "held_rows"  # in a state, in the place of "basis": the rows held here alone
NOT_ORTHONORMAL = 0.1  # |UᵀU − I| that no storage format explains


def may_be_factored(dim: int, num_columns: int, itemsize: int) -> bool:
    """Whether a U (D, K) is kept factored; 16 bits have none to lose by magnifying."""
    return dim >= TALL * num_columns and itemsize >= torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Turn:
    """Q P for an update U ← U P + Hᵀ M that may follow, and whether U stays factored.

    Attributes:
        Q: Q P, shape (K, K).
        inverse: (Q P)⁻¹, shape (K, K).
        is_good: A scalar: 1 if S may take the samples in, 0 if U is to be multiplied
            out.
    """

    Q: Tensor
    inverse: Tensor
    is_good: Tensor


class Factored:
    """U in its storage format.

    Args:
        shard: Which of the D rows are held here.
        num_columns: K.
        dtype: Storage format; products are formed in float32 at least.
        device: Where it lives.
        factored: Whether Q may be other than 1.
    """

    def __init__(
        self,
        shard: Shard,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        *,
        factored: bool = True,
    ) -> None:
        if dtype not in STORAGE:
            raise ValueError(f"dtype must be one of {STORAGE}, got {dtype}")
        self.shard = shard
        self._S = torch.zeros(shard.num_rows, num_columns, dtype=dtype, device=device)
        self._Q: Tensor | None = None
        # The same for all workers: a checkpoint puts their rows together.
        self._may_factor = factored and may_be_factored(
            shard.dim, num_columns, dtype.itemsize
        )

    @property
    def num_columns(self) -> int:
        """K."""
        return self._S.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Storage format."""
        return self._S.dtype

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._S.device

    @property
    def matrix(self) -> Tensor:
        """U (D, K), the rows held here; a copy if it is factored, else a view."""
        if self._Q is None:
            return self._S
        return self.times(self._Q.new_ones(()).expand(self.num_columns).diag())

    def times(self, X: Tensor) -> Tensor:
        """U X for a small matrix (K, n), in the storage format, shape (D, n)."""
        X = (X if self._Q is None else self._Q @ X).to(compute_dtype(self.dtype))
        result = self._S.new_empty(len(self._S), X.shape[1])
        for rows in passes.row_blocks(self._S, self.num_columns):
            result[rows] = self._S[rows].to(X.dtype) @ X
        return result

    def products(self, samples: Samples) -> Steps[Products]:
        """Products of samples with each other and with U."""
        return samples.products(self._S, self._Q, self.shard)

    def products_without_action(self, samples: Rows) -> Steps[Products]:
        """The same without H Hᵀ V."""
        return samples.products_without_action(self._S, self._Q, self.shard)

    def outside(self, samples: Rows, V: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """What centred samples have outside U: H⊥ U and H⊥ H⊥ᵀ."""
        return samples.outside(self._S, self._Q, V, self.shard)

    def coordinates(self, samples: Samples) -> Steps[Tensor]:
        """G U for samples (B, D): float64, shape (B, K)."""
        return samples.coordinates(self._S, self._Q, self.shard)

    def turn(self, P: Tensor) -> Steps[Turn]:
        """What U ← U P + Hᵀ M would do to Q; nothing is changed."""
        Q = P if self._Q is None else self._Q @ P
        if not self._may_factor:
            return Turn(Q, Q, Q.new_zeros(()))
        return Turn(Q, *(yield Small(inverse_if_good, (Q,))))

    def recombine_(
        self, turn: Turn, samples: Samples, V: Tensor, X: Tensor, *, factored: bool
    ) -> None:
        """U ← U P + Hᵀ V X.

        Args:
            turn: That of P.
            samples: Shape (B, D).
            V: Shape (B, K), columns that sum to zero.
            X: Shape (K, K).
            factored: Whether U stays factored, which ``turn`` allows or not.
        """
        P = None if factored else turn.Q
        X = X @ turn.inverse if factored else X
        for columns, wide, small, prepare in samples.combinations(V, X):
            passes.recombine_(self._S[columns], P, wide, small, prepare)
        # As it comes out of a file: products round in an order that strides decide.
        self._Q = turn.Q.contiguous() if factored else None

    def multiplied_out(self) -> Tensor:
        """U as one matrix to write to, (D, K): from here on Q = 1."""
        if self._Q is not None:
            passes.recombine_(self._S, self._Q)
            self._Q = None
        return self._S

    def gram(self) -> Steps[Tensor]:
        """Uᵀ U, shape (K, K)."""
        (C,) = yield Sum(self.shard.total, (passes.gram(self._S),))
        return C if self._Q is None else self._Q.T @ C @ self._Q

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
        (c,) = self.shard.total(passes.multiply(gradient[None], self._S)[0])
        c = c if self._Q is None else c @ self._Q
        c = strength * (c if chosen is None else chosen @ (chosen.T @ c))
        c = c if self._Q is None else self._Q @ c
        return passes.subtract_combination(gradient, self._S, c)

    def orthonormalize_(
        self, seed: int, fill: Tensor, num_filled: int, num_columns: int | None = None
    ) -> Steps[Tensor]:
        """Make the first columns orthonormal; the largest entry of |UᵀU − I| left.

        Args:
            seed: Of the random directions.
            fill: Mask of columns to be replaced by random ones, shape (K,).
            num_filled: How many these are.
            num_columns: How many columns there are, if not all; the others are zero.
        """
        U = self.multiplied_out()[:, :num_columns]
        generator = torch.Generator(self.device).manual_seed(seed)
        fill = fill[:num_columns]
        return orthonormalize_(U, generator, self.shard, fill, num_filled)

    @property
    def orthogonality_limit(self) -> float:
        """How small |UᵀU − I| can be expected to be."""
        return orthogonality_limit(self.dtype, self.shard.dim)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of all D rows of S, those of other workers too, and of Q."""
        no_Q = self._S.new_empty(0, self.num_columns, dtype=torch.float64)
        S = self.shard.collect(self._S)
        return {
            "basis": S.clone() if S is self._S else S,
            "Q": no_Q if self._Q is None else self._Q.clone(),
        }

    @own_arithmetic
    def check_state(self, state: Mapping[str, Tensor], required: Tensor) -> None:
        """Refuse a state of another shape or storage, or that is no basis.

        Args:
            state: What is to be loaded.
            required: Mask of the columns that must not be zero, shape (K,).
        """
        is_whole = HELD not in state
        rows = "basis" if is_whole else HELD
        for name in (rows, "Q"):
            if not isinstance(state.get(name), Tensor):
                raise ValueError(
                    f"the state has no {name!r}: it was written by another tracker, "
                    f"use the same tracker and oversample"
                )
        S, Q = state[rows], state["Q"]
        num_rows = self.shard.dim if is_whole else self.shard.num_rows
        shape = (num_rows, self.num_columns)
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
                f"the saved Q is stored as {Q.dtype}, not as torch.float64: the file "
                f"is damaged, or no state of a tracker; go back to an older one"
            )
        if Q.shape not in ((0, self.num_columns), (self.num_columns,) * 2):
            raise ValueError(
                f"the saved Q has shape {tuple(Q.shape)}, a basis of "
                f"{self.num_columns} columns has none or a square one: it was written "
                f"by an older version of dome, finish that run with it"
            )
        C = passes.gram(S)
        (C,) = (C,) if is_whole else self.shard.total(C)
        C = Q.to(C).T @ C @ Q.to(C) if len(Q) else C
        present = (C.diagonal() > 0) | required.to(C.device)
        error = float((C - torch.diag(present.to(C.dtype))).abs().max())
        if not error <= NOT_ORTHONORMAL:
            raise ValueError(
                f"the saved basis is not orthonormal, |UᵀU − I| = {error:.2g}: the "
                f"file is damaged, or no state of a tracker; go back to an older one"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of the same shape and storage back."""
        held = state[HELD] if HELD in state else self.shard.held_of(state["basis"])
        self._S.copy_(held)
        Q = state["Q"]
        self._Q = Q.to(self.device, copy=True) if len(Q) else None


def inverse_if_good(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Q⁻¹ (..., K, K), and whether U = S Q may be kept so: 1 or 0, shape (...)."""
    inverse, info = torch.linalg.inv_ex(Q)
    # U has columns of length one, S = U Q⁻¹ those of Q⁻¹. Each of them is rounded
    # relative to its own length, so that only Q's turns magnify, not its scales.
    squared = inverse.square().sum(dim=-2)
    magnified = (squared.unsqueeze(-2) @ Q.square()).amax(dim=(-2, -1))
    is_good = (magnified <= MOST_MAGNIFIED**2) & (squared.amax(-1) <= LONGEST**2)
    return inverse, (is_good & (info == 0)).to(Q.dtype)
