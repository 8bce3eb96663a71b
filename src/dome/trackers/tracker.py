"""All of a tracker but its method, and the update of one or of many.

Shapes: G (B, D) samples, U (D, K) basis, λ (K,) eigenvalues. A method is a file of its
own (``power.py``, ``svd.py``). It says what it must know of samples (``look``, ``act``:
products over the D rows), what they make of U (``plan``: small float64 matrices on the
host, nothing is changed), and writes that down (``apply``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dome.torch_private import no_autocast, own_arithmetic
from dome.trackers.basis import FactoredBasis
from dome.trackers.linalg import Shard, Total, alone
from dome.trackers.parts import PartialRows
from dome.trackers.protocol import PlannedTracker, Squares, Sums, Update
from dome.trackers.samples import Intake, Samples, Seen
from dome.trackers.states import check_small, draw_seed, translated


def update_all(
    trackers: Iterable[PlannedTracker], grads: Iterable[Any], scale: float = 1.0
) -> None:
    """Fold samples into trackers, each its own; for one of them or for a hundred.

    Sums over workers are one message for all, and the device is waited for once.

    Args:
        trackers: They all hold rows of the same workers' parameters.
        grads: What each takes: rows (B, D of it), or what it knows besides.
        scale: Factor on all samples.
    """
    with torch.no_grad(), no_autocast():
        todo = [(t, t.admitted(G, scale)) for t, G in zip(trackers, grads, strict=True)]
        while todo := [(t, H) for t, H in todo if H is not None]:
            total = todo[0][0].total
            looked = added_up(total, [t.look(H) for t, H in todo])
            more = [t.act(H, s) for (t, H), s in zip(todo, looked, strict=True)]
            acted = added_up(total, more)
            known = on_host([a | b for a, b in zip(looked, acted, strict=True)])
            # Seldom, samples want to be looked at once more, with care.
            todo = [(t, t.turn(H, s)) for (t, H), s in zip(todo, known, strict=True)]


def added_up(total: Total, sums: Sequence[Sums]) -> Sequence[Sums]:
    """Sums over all workers' rows, in one message."""
    parts = [part for some in sums for part in some.values()]
    if total is alone or not parts:
        return sums
    whole = iter(total(*parts))
    return [{name: next(whole) for name in some} for some in sums]


def on_host(sums: Sequence[Sums]) -> Sequence[Sums]:
    """The same on the host, in one copy: here the device is waited for."""
    parts = [part for some in sums for part in some.values()]
    if all(part.device.type == "cpu" for part in parts):
        return sums
    flat = torch.cat([part.double().reshape(-1) for part in parts]).cpu()
    pieces = iter(flat.split([part.numel() for part in parts]))
    return [{n: next(pieces).view(part.shape) for n, part in s.items()} for s in sums]


class BasisTracker(ABC):
    """A basis of K directions that a stream of samples turns.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        forget: None averages all batches (the paper); a number in (0, 1) is the weight
            of the newest batch instead.
        oversample: Track this many directions more, and remove the leading K.
        dtype: What the basis is stored in: float32, float64, or bfloat16 with float32
            arithmetic.
        device: Where the basis lives.
        generator: Source of random directions. Without one, a fixed seed is used.
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
        K, seed = self._intake.num_columns, draw_seed(generator)
        shard = self._intake.shard
        self._U = FactoredBasis(shard, K, dtype, device, seed, factored=factored)
        self.total = shard.total  # adds up over workers that hold the other rows
        self._is_turned = False  # by a sample: before, nothing is removed
        self._values = torch.ones(K, dtype=torch.float64)
        self._eigenvalues = self._values[:rank]  # of the directions that are removed
        # Which directions of U these are, (K, rank); None for all.
        eye = torch.diag(self._values)
        self._leading = eye[:, :rank].contiguous() if rank < K else None
        # Names in the state, and the attributes that hold these tensors.
        self._entries: dict[str, str] = {}
        self._newest: Update | Callable[[], Update] | None = None
        self.newest_squares: Squares | None = None
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """What the method has beside U and λ, listed in ``_entries``."""

    @abstractmethod
    def look(self, H: Samples) -> Sums:
        """Products of samples over the rows held here, to be added up over workers."""

    @abstractmethod
    def act(self, H: Samples, sums: Sums) -> Sums:
        """The same, of what is known only when those have been added up."""

    @abstractmethod
    def fold(self, H: Samples, seen: Seen, sums: Sums, *, is_lost: bool) -> None:
        """Plan and apply; ``is_lost`` if U is to be made orthonormal in any case."""

    @abstractmethod
    def _determined(self) -> float:
        """How many directions samples have determined."""

    @abstractmethod
    def _restart(self, arbitrary: Tensor) -> None:
        """Make U orthonormal in ``become_``, and set what goes with it."""

    @abstractmethod
    def arbitrary_in(self, C: Tensor) -> Tensor:
        """How much of the columns U C is arbitrary: NᵀN, shape (K, K)."""

    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        update_all([self], [grads], scale)

    def admitted(
        self, grads: Tensor | PartialRows | Samples, scale: float
    ) -> Samples | None:
        """The samples ``scale * grads``, unless there are too few of them."""
        if not isinstance(grads, Samples):
            self._intake.check(grads)
            grads = Samples(grads, scale)
        return grads if self._intake.admits(len(grads)) else None

    def turn(self, H: Samples, sums: Sums) -> Samples | None:
        """Turn U; or the same samples, if they are to be looked at with care first."""
        seen, C = H.seen(sums), sums.get("UU")
        self.newest_squares = None
        if seen.wants_care and not H.are_careful:
            return H.carefully(self._U.shard, self._U.dtype)
        is_lost = C is not None and self._U.is_lost(C)
        if not self._intake.accepts(seen.is_finite):
            return None
        if self.num_updates > 1:
            self.newest_squares = self._squares(seen)
        if seen.is_constant:  # W = 0: Y has the columns of U, and λ = s
            past, _ = self._intake.weights()
            self._eigenvalues = past * self._eigenvalues
            self._values = past * self._values
            self._note_no_change(seen)
        else:
            self.fold(H, seen, sums, is_lost=is_lost)
        return None

    def _squares(self, seen: Seen) -> Squares:
        """What the batch has inside of the span that is removed now."""
        V, m = seen.V, seen.m
        if self._leading is not None:
            leading = self._leading.to(V)
            V, m = V @ leading, m @ leading
        if not self._is_turned:  # batches without variance: nothing is removed
            V, m = torch.zeros_like(V), torch.zeros_like(m)
        v = V.reshape(-1)
        values = torch.stack([seen.energy, v.dot(v), seen.mu2, m.dot(m)])
        return Squares(len(V), self._U.there(values))

    def _with_gram(self, sums: Sums) -> Sums:
        """With UᵀU, where it is due to be measured."""
        C = self._U.gram_if_due(self._intake.num_updates)
        return sums if C is None else sums | {"UU": C}

    def _note(
        self, seen: Seen, P: Tensor, M: Tensor, GU: Tensor, num_before: float
    ) -> None:
        """Remember U ← U P + Hᵀ M; its record is computed once somebody asks.

        Args:
            seen: What the samples had in common with the old U.
            P: Shape (K, K).
            M: Shape (B, K).
            GU: Samples in the new columns, here or on the device, shape (B, K).
            num_before: How many directions there were.
        """
        if self._leading is not None:
            GU = GU @ self._leading.to(GU.device, non_blocking=True)

        def update() -> Update:
            cosines = (P + seen.V.T @ M).square().sum() / max(num_before, 1)
            there = self._U.there  # beside what else is asked of a step
            return Update(
                captured=there(GU.square().sum(dim=1)),
                total=there(seen.totals),
                drift=there((1 - cosines).clamp(min=0.0).sqrt()),
                mean_captured=there(GU.mean(dim=0).square().sum()),
                mean_total=there(seen.mu2),
            )

        self._newest = update

    def _note_no_change(self, seen: Seen) -> None:
        """Remember a batch that did not turn U."""
        P = torch.eye(seen.V.shape[1], dtype=seen.V.dtype)
        GU, num = seen.V + seen.m, self._U.num_columns
        self._note(seen, P, torch.zeros_like(seen.V), GU, num)

    def _coordinates(self, H: Samples) -> Tensor:
        """G U of all rows, where U has been made orthonormal; shape (B, K)."""
        (GU,) = self.total(H.coordinates(self._U))
        return GU

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        if callable(self._newest):
            self._newest = self._newest()
        return self._newest

    @property
    def basis(self) -> Tensor:
        """U, orthonormal columns, shape (D, K); clone it to keep it past an update."""
        return self._U.matrix if self._leading is None else self._U.times(self._leading)

    @property
    def columns(self) -> Tensor:
        """All the tracked columns, shape (D, K + oversample); clone them to keep."""
        return self._U.matrix

    @property
    def column_values(self) -> Tensor:
        """Eigenvalues of all the tracked ``columns``."""
        return self._U.there(self._values)

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the averaged covariance, as the method knows them, (K,)."""
        return self._U.there(self._eigenvalues.clone())

    @property
    def effective_rank(self) -> float:
        """How many of the tracked directions samples have determined so far."""
        return self._determined()

    @property
    def num_updates(self) -> int:
        """How many batches have turned the basis."""
        return self._intake.num_updates

    @property
    def num_skipped(self) -> int:
        """Intake left out: not finite, or of one sample."""
        return self._intake.num_skipped

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""
        return self._U.error

    @own_arithmetic
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U Uᵀ g for a gradient (D,); g before a sample has turned U."""
        strength = strength if self._is_turned else 0.0
        return self._U.project_out(gradient, self._leading, strength)

    def _small(self) -> dict[str, Tensor]:
        """The state of the method, and of what was let in."""
        own = {name: getattr(self, place) for name, place in self._entries.items()}
        return own | self._intake.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a snapshot, D K numbers."""
        return self._U.state_dict() | {n: t.clone() for n, t in self._small().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what is no state of such a tracker by name; nothing is changed."""
        self._U.check_state(translated(state), self._required_in(state))
        check_small(state, self._small() | self._U.small_state())

    def _required_in(self, state: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Which columns of U a state must have, and not as zeros: a mask (K,)."""
        return torch.ones_like(self._values, dtype=torch.bool)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""
        self.check_state(state)
        self._U.load_state_dict(translated(state))
        self._intake.load_state_dict(state)
        for name, place in self._entries.items():
            setattr(self, place, state[name].to("cpu", copy=True))
        if "leading_eigenvalues" not in self._entries:
            self._eigenvalues = self._values[: len(self._eigenvalues)]
        self._newest, self._is_turned = None, self.effective_rank > 0

    @own_arithmetic
    def become_(
        self, columns: Tensor, values: Tensor, arbitrary: Tensor, num_updates: int
    ) -> None:
        """Go on from a basis that several trackers have in common.

        Args:
            columns: Orthogonal, zero where nothing determines them, shape (D, K).
            values: Their eigenvalues, largest first, shape (K,); zero likewise.
            arbitrary: The sum of all their ``arbitrary_in``, shape (K, K).
            num_updates: How many updates they stand for.
        """
        self._U.write_(columns)
        self._intake.num_updates = num_updates
        self._values, rank = values.cpu(), len(self._eigenvalues)
        self._eigenvalues = self._values[:rank]
        if self._leading is not None:
            self._leading = torch.eye(len(values)).to(self._leading)[:, :rank]
        self._restart(arbitrary.cpu())
        self._newest, self._is_turned = None, self.effective_rank > 0
