"""Where a basis may come from when samples are private: three sources, no other.

Shapes: U (D, K) the basis, r (D,) a released (noised) sum of clipped gradients over the
expected batch size. A source sees public samples or releases, never private samples.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from dome.options import FilterOptions
from dome.parameters import Layout
from dome.trackers import Tracker


@dataclass(frozen=True, slots=True)
class Setting:
    """What a source of directions may be made of.

    Attributes:
        model: The model that is trained.
        layout: Its parameters.
        options: Those of the filter; the rank is a number above 0.
        window: How many releases make one batch of samples.
        public: Batches (x, y) of public data, where they are given.
        loss_fn: Their loss.
    """

    model: nn.Module
    layout: Layout
    options: FilterOptions
    window: int
    public: Iterable[tuple[Tensor, Tensor]] | None = None
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def rank(self) -> int:
        """K."""
        return cast("int", self.options.rank)

    def tracker(self) -> Tracker:
        """A tracker of these options; samples are filtered with U as a matrix."""
        where = {"dtype": self.layout.dtype, "device": self.layout.device}
        return self.options.tracker_for(
            self.layout.dim, self.rank, **where, factored=False
        )


@dataclass(frozen=True, slots=True)
class Release:
    """What a step has released, noise and all.

    Attributes:
        gradient: Σ clip(g) over the expected batch size, noised, shape (D,).
        moment: Σ g̃ [g̃ᵀ U, C] / C² over the expected batch size, noised, shape
            (D, K + 1); None on steps that did not release it.
        moment_std: Standard deviation of the noise in ``moment``.
    """

    gradient: Tensor
    moment: Tensor | None = None
    moment_std: float = 0.0


class Basis(Protocol):
    """A source of directions; all it knows is public or released."""

    @property
    def filters_first(self) -> bool:
        """Whether samples are filtered before they are clipped, or sums after noise."""

    @property
    def moment_basis(self) -> Tensor | None:
        """U (D, K) of the second moment that a step releases as well; None without."""

    def prepare(self) -> None:
        """Get ready for a step; nothing of its samples is known."""

    def directions(self) -> Tensor | None:
        """U (D, K); None as long as there is none, and nothing is removed."""

    def learn(self, release: Release) -> None:
        """Learn from what a step released."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on, as tensors."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state; that of another basis changes nothing here."""


class Nothing:
    """No directions: plain DP-SGD."""

    filters_first = True
    moment_basis = None

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def directions(self) -> Tensor | None:
        """None: nothing is removed."""
        return None

    def learn(self, release: Release) -> None:
        """There is nothing to turn."""

    def state_dict(self) -> dict[str, Tensor]:
        """An empty dictionary."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Refuse the state of a basis that there is."""
        if state:
            raise ValueError(another_basis())


def load_tracker(tracker: Tracker, state: dict[str, Tensor]) -> None:
    """Give a basis' tracker its state back, or say that it is another's."""
    try:
        tracker.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise ValueError(another_basis()) from error


def another_basis() -> str:
    """The sentence for a state that another basis has written."""
    return "the checkpoint has another basis: use the same basis, rank and tracker"
