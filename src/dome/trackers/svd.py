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

from dome.numerics.factored import Factored, Turn
from dome.numerics.passes import compute_dtype
from dome.numerics.products import Products, Rows
from dome.numerics.shard import Shard
from dome.numerics.together import Ask, Small, Steps, together
from dome.trackers.intake import Intake
from dome.trackers.ledger import Ledger
from dome.trackers.protocol import Update
from dome.trackers.states import check_small, draw_seed, translated

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


class IncrementalSVD:
    """Best rank-K update at every batch: sorted eigenvalues, no arbitrary directions.

    The rank grows by B − 1 a batch until it is K; columns not reached yet are zero and
    remove nothing. Batches of more than 512 (or 2 K) samples are folded in by parts of
    that size, each truncated to rank K; smaller ones are exact.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        forget: None averages all batches; a number in (0, 1) is the weight of the
            newest.
        oversample: Keep this many directions more than are removed.
        dtype: Storage of the basis: float32, float64, or bfloat16 with float32
            arithmetic.
        device: Where the basis lives.
        generator: Unused directions are never drawn; accepted so that trackers agree.
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
        self._values = torch.zeros(K, dtype=torch.float64, device=device)
        self._rank = rank
        eye = torch.eye(K, dtype=torch.float64, device=device)
        self._leading = eye[:, :rank].contiguous() if rank < K else None
        self._doubt = 0.0  # bound on what rounding did to UᵀU = I since the last repair

    @torch.no_grad()
    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        self._intake.check(grads)
        together([self.updating(Rows(grads, scale))])

    takes_actions = False

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
        error = yield from self._ledger.error(self._intake.num_updates)
        asked = (*samples.questions(seen), turn.is_good, new.rank, new.doubt, error)
        finite, constant, care, good, present, doubt, lost = yield Ask(asked)
        if care:
            careful = yield from samples.careful(self._U.shard)
            return (yield from self.updating(careful))
        if not self._intake.accepts(finite):
            return
        if constant:
            self._values = past * self._values
            self._ledger.note_no_change(seen, self._leading, (self._values > 0).sum())
            return
        self._overwrite_(samples, new, turn, factored=bool(good))
        repaired = yield from self._repair(present, doubt, lost)
        seen = replace(seen, V=new.V)
        if repaired:
            coords = yield from self._U.coordinates(samples)
        else:  # G U P + G Hᵀ M
            coords = (seen.V + seen.m) @ new.P + new.HHM + seen.Hmu @ new.M
        self._ledger.note(seen, new.P, new.M, coords[:, : self._rank], new.rank)

    def _by_parts(
        self, samples: Rows, seen: Products, past: float, newest: float
    ) -> Steps[None]:
        """The same for a large batch: one part of its centred rows after the other."""
        finite, constant, care = yield Ask(samples.questions(seen))
        if care:
            careful = yield from samples.careful(self._U.shard)
            return (yield from self.updating(careful))
        if not self._intake.accepts(finite):
            return
        self._values = past * self._values
        num_parts = -(-len(samples) // max(ROWS_AT_ONCE, 2 * self._U.num_columns))
        power = 1.0 if samples.power is None else samples.power
        mean, doubt = samples.rows.mean(dim=0), self._values.new_zeros(())
        for part in () if constant else samples.rows.tensor_split(num_parts):
            # Rows are centred on the whole batch; the part's own mean then is variance
            # too, which the mirrored rows keep: [h; −h]/√2 has mean zero.
            rows = (part - mean) * (power * 0.5**0.5)
            both = Rows(torch.cat([rows, -rows]), samples.scale / power)
            share = newest * len(both) / len(samples)
            inner = yield from self._U.products_without_action(both)
            new = yield from self._folded(both, inner, self._values, share)
            turn = yield from self._U.turn(new.P)
            self._overwrite_(both, new, turn, factored=False)
            doubt = doubt + new.doubt
        rank = (self._values > 0).sum()
        answers = yield Ask((rank, doubt, torch.full_like(doubt, -1.0)))
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
        # A batch that is not finite is left out later, and must not stop eigh here.
        V = (seen.V + correction).nan_to_num(0.0, 0.0, 0.0)
        inner = (inner - correction @ correction.T).nan_to_num(0.0, 0.0, 0.0)
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
        # Z is orthonormal up to the rounding of its Gram matrix over θ, and Hᵀ M
        # cancels against U Vᵀ M: both matter where a batch has directions of very
        # unequal length.
        ratio = torch.where(keep, theta[-1:] / theta, 0.0)[:, None]
        uneven = (X[K:].square() * ratio).sum(dim=0).amax()
        cancelled = length.sqrt() * M.norm(dim=0).amax()
        return Folded(
            values=torch.where(known, values[:K], 0.0),
            rank=known.sum(),
            P=X[:K] - V.T @ M,
            M=M,
            V=V,
            HHM=V @ (V.T @ M) + inner @ M,
            doubt=eps * (10 * uneven + cancelled),
        )

    def _overwrite_(
        self, samples: Rows, new: Folded, turn: Turn, *, factored: bool
    ) -> None:
        eye = torch.eye(len(new.P), dtype=new.P.dtype, device=new.P.device)
        self._U.recombine_(turn, samples, new.M, eye, factored=factored)
        self._values = new.values

    def _repair(self, rank: float, doubt: float, error: float) -> Steps[bool]:
        """Make U orthonormal again once rounding may have cost it too much."""
        self._doubt += doubt
        eps = torch.finfo(compute_dtype(self._U.dtype)).eps
        due = self._ledger.is_lost(error) or self._doubt > 16 * eps
        if due and rank:
            no = torch.zeros_like(self._values, dtype=torch.bool)
            yield from self._ledger.repair(self._intake.num_updates, no, 0, int(rank))
            self._doubt = 0.0
        return due and rank > 0

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        return self._ledger.newest

    @property
    def basis(self) -> Tensor:
        """U: orthonormal columns, then zeros, shape (D, K); clone it to keep it."""
        return self._U.matrix[:, : self._rank]

    @property
    def columns(self) -> Tensor:
        """All the tracked columns, shape (D, K + oversample); clone them to keep."""
        return self._U.matrix

    @property
    def column_values(self) -> Tensor:
        """Eigenvalues of all the tracked ``columns``."""
        return self._values

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the averaged covariance, largest first, shape (K,)."""
        return self._values[: self._rank].clone()

    @property
    def effective_rank(self) -> float:
        """How many directions the samples have determined so far."""
        return float((self._values > 0).sum())

    @property
    def num_updates(self) -> int:
        """How many batches have turned the basis."""
        return self._intake.num_updates

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
        """g − strength · U Uᵀ g for a gradient of shape (D,)."""
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
        self._values = state["values"].to(self._values, copy=True)
        self._doubt = float(state["doubt"])

    def _small(self) -> dict[str, Tensor]:
        """The state without U."""
        doubt = torch.tensor(self._doubt, dtype=torch.float64)
        own = {"values": self._values, "doubt": doubt}
        return own | self._intake.state_dict() | self._ledger.state_dict()

    @torch.no_grad()
    def become_(
        self, columns: Tensor, values: Tensor, arbitrary: Tensor, num_updates: int
    ) -> None:
        """Go on from a basis that several trackers have in common.

        Args:
            columns: Orthogonal, zero where nothing determines them, shape (D, K).
            values: Their eigenvalues, largest first, shape (K,); zero likewise.
            arbitrary: No direction of this tracker is.
            num_updates: How many updates they stand for.
        """
        del arbitrary
        self._U.multiplied_out().copy_(columns)
        self._values, self._intake.num_updates = values, num_updates
        self._doubt = torch.inf
        together([self._repair(float((values > 0).sum()), 0.0, -1.0)])
        self._doubt = 0.0
        self._ledger.forget()

    def arbitrary_in(self, C: Tensor) -> Tensor:
        """How much of the columns U C is arbitrary, shape (K, K): nothing."""
        return torch.zeros_like(C)


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
