"""Where a basis may come from when samples are private: three sources, no other.

Shapes: U (D, K) the basis, r (D,) a released (noised) sum of clipped gradients over the
expected batch size. A source sees public samples or releases, never private samples.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dome.privacy.errors import PrivacyError
from dome.trackers import Tracker

BASES = ("public", "released", "private")


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


def check_basis(basis: Any) -> None:  # noqa: ANN401 (anything may be passed)
    """Refuse every source of a basis but the three that keep privacy."""
    if isinstance(basis, str) and basis in BASES:
        return
    raise PrivacyError(
        f"basis={basis!r}: a basis that private samples turn is itself a release of "
        f"them. What the filter removes shows it (the gradient has nothing left along "
        f"it), and no noise covers that, so that epsilon would be understated without "
        f"bound. Choose 'public' (a loader of public data), 'released' (past noised "
        f"gradients, free) or 'private' (noised power iterations, paid for jointly)"
    )
