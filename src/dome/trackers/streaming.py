"""All of a tracker but its method: the basis, what it let in, what it did, its state.

Shapes: G (B, D) samples, U (D, K) basis, λ (K,) eigenvalues. A method is a file of its
own (``power.py``, ``svd.py``) and says in ``updating`` how samples turn U.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dome.numerics.arithmetic import own_arithmetic
from dome.numerics.factored import Factored, Turn
from dome.numerics.products import Products, Rows
from dome.numerics.shard import Shard
from dome.numerics.together import Ask, Steps, together
from dome.trackers.intake import Intake
from dome.trackers.ledger import Ledger
from dome.trackers.protocol import Update
from dome.trackers.states import check_small, draw_seed, translated


class Verdict(NamedTuple):
    """What the device was asked about a batch and the update it leads to."""

    is_finite: bool
    is_constant: bool  # all samples are the same, up to rounding
    wants_care: bool  # begin again with samples that are scaled and centred first
    stays_factored: bool
    is_lost: bool  # U is less orthonormal than rounding explains
    more: list[float]  # what the method asked besides


class StreamingBasis(ABC):
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
        K = self._intake.num_columns
        self._U = Factored(self._intake.shard, K, dtype, device, factored=factored)
        self._ledger = Ledger(self._U, draw_seed(generator))
        self._is_turned = False  # by a sample: before, nothing is removed
        self._values = torch.ones(K, dtype=torch.float64, device=device)
        self._eigenvalues = self._values[:rank]  # of the directions that are removed
        # Which directions of U these are, (K, rank); None for all.
        eye = torch.diag(self._values)
        self._leading = eye[:, :rank].contiguous() if rank < K else None
        # Names in the state, and the attributes that hold these tensors.
        self._entries: dict[str, str] = {}
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """What the method has beside U and λ, listed in ``_entries``."""

    @abstractmethod
    def updating(self, samples: Any) -> Steps[None]:  # noqa: ANN401 (Rows, or any kind)
        """The update, in steps for ``together``."""

    @abstractmethod
    def _determined(self) -> Tensor:
        """How many directions samples have determined, a scalar."""

    @abstractmethod
    def _restart(self, arbitrary: Tensor) -> None:
        """Make U orthonormal in ``become_``, and set what goes with it."""

    @abstractmethod
    def arbitrary_in(self, C: Tensor) -> Tensor:
        """How much of the columns U C is arbitrary: NᵀN, shape (K, K)."""

    @own_arithmetic
    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        self._intake.check(grads)
        together([self.updating(Rows(grads, scale))])

    def _verdict(
        self, questions: tuple[Tensor, ...], turn: Turn, *more: Tensor
    ) -> Steps[Verdict]:
        """Everything that must be known before U is overwritten, asked at once."""
        error = yield from self._ledger.error(self._intake.num_updates)
        asked = (*questions, turn.is_good, error, *more)
        finite, constant, care, good, error, *answers = yield Ask(asked)
        lost = self._ledger.is_lost(error)
        flags = (bool(finite), bool(constant), bool(care), bool(good))
        return Verdict(*flags, lost, answers)

    def _begin_again(self, samples: Any) -> Steps[None]:  # noqa: ANN401 (any kind)
        """Samples whose products would lose digits are scaled and centred first."""
        careful = yield from samples.careful(self._U.shard)
        yield from self.updating(careful)

    def _fade(self, past: float, seen: Products) -> None:
        """A batch without variance: W = 0, U stays, and eigenvalues get smaller."""
        self._values, self._eigenvalues = past * self._values, past * self._eigenvalues
        self._ledger.note_no_change(seen, self._leading, self._determined())

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
    def column_values(self) -> Tensor:
        """Eigenvalues of all the tracked ``columns``."""
        return self._values

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the averaged covariance, as the method knows them, (K,)."""
        return self._eigenvalues.clone()

    @property
    def effective_rank(self) -> float:
        """How many of the tracked directions samples have determined so far."""
        return float(self._determined())

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

    @own_arithmetic
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U Uᵀ g for a gradient (D,); g before a sample has turned U."""
        strength = strength if self._is_turned else 0.0
        return self._U.project_out(gradient, self._leading, strength)

    def _small(self) -> dict[str, Tensor]:
        """The state without U."""
        own = {name: getattr(self, place) for name, place in self._entries.items()}
        return own | self._intake.state_dict() | self._ledger.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a snapshot, D K numbers."""
        return self._U.state_dict() | {n: t.clone() for n, t in self._small().items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what is no state of such a tracker by name; nothing is changed."""
        self._U.check_state(translated(state), self._required_in(state))
        check_small(state, self._small())

    def _required_in(self, state: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Which columns of U a state must have, and not as zeros: a mask (K,)."""
        return torch.ones_like(self._values, dtype=torch.bool)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""
        self.check_state(state)
        self._U.load_state_dict(translated(state))
        self._intake.load_state_dict(state)
        self._ledger.load_state_dict(state)
        own = {place: state[name] for name, place in self._entries.items()}
        for place, tensor in own.items():
            setattr(self, place, tensor.to(getattr(self, place), copy=True))
        if "_eigenvalues" not in own:
            self._eigenvalues = self._values[: len(self._eigenvalues)]
        self._is_turned = self.effective_rank > 0

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
        self._U.multiplied_out().copy_(columns)
        self._intake.num_updates = num_updates
        self._values, rank = values, len(self._eigenvalues)
        self._eigenvalues = values[:rank]
        if self._leading is not None:
            self._leading = torch.eye(len(values)).to(self._leading)[:, :rank]
        self._restart(arbitrary)
        self._is_turned = self.effective_rank > 0
        self._ledger.forget()
