"""What a tracker is, and what it tells about an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from dome.trackers.linalg import Total

Sums = dict[str, Tensor]  # over all D: workers add up those of their columns


@dataclass(frozen=True, slots=True)
class Update:
    """What one update saw, in tensors that are still on the device.

    Attributes:
        captured: ‖Uᵀ g_b‖² of every sample with the updated basis, shape (B,).
        total: ‖g_b‖² of every sample, shape (B,).
        drift: Root mean square sine of the angles between the old and the new subspace.
        mean_captured: ‖Uᵀ μ‖² of the samples' mean; None where it is not known.
        mean_total: ‖μ‖²; None where it is not known.
        effective_rank: How many of the directions the samples have determined, if known
            without asking.
        orthogonality_error: Largest entry of |UᵀU − I|, where it is on the device too.
    """

    captured: Tensor
    total: Tensor
    drift: Tensor
    mean_captured: Tensor | None = None
    mean_total: Tensor | None = None
    effective_rank: Tensor | None = None
    orthogonality_error: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Squares:
    """Squared norms of a batch, inside the span that was removed before its update.

    The batch has had no part in that span, so that these tell what it does to others.

    Attributes:
        num_samples: B, of all workers.
        values: Σ_b ‖h_b‖² of centred samples, of that what is inside, ‖μ‖² of the mean,
            and of that what is inside; shape (4,).
        has_mean: Whether ‖μ‖² is known; if not, the first value is Σ_b ‖g_b‖².
    """

    num_samples: int
    values: Tensor
    has_mean: bool = True


class Tracker(Protocol):
    """Follows the leading eigenspace of the centred covariance of a stream."""

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""

    @property
    def num_skipped(self) -> int:
        """Intake left out: not finite, or of one sample."""

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""

    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate."""

    @property
    def basis(self) -> Tensor:
        """U, the directions to remove, shape (D, K), valid until the next update."""

    @property
    def eigenvalues(self) -> Tensor:
        """Variance along each direction, shape (K,)."""

    @property
    def effective_rank(self) -> float:
        """How many of the K directions the samples have determined so far."""

    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U Uᵀ g, shape (D,)."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit, as tensors of its own."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""


def missing_members(tracker: object) -> list[str]:
    """What a tracker lacks of the protocol."""
    names = (name for name in vars(Tracker) if not name.startswith("_"))
    return [name for name in names if not hasattr(tracker, name)]


class PlannedTracker(Tracker, Protocol):
    """A tracker of this package: ``update_all`` asks the device once for many."""

    newest_squares: Squares | None  # of the newest batch; None if it was left out

    @property
    def total(self) -> Total:
        """Adds up over the workers that hold other rows."""

    def admitted(self, grads: Any, scale: float) -> Any:  # noqa: ANN401 (its own kind)
        """The samples ``scale * grads`` as it takes them; None if there are too few."""

    def look(self, H: Any) -> Sums:  # noqa: ANN401
        """What it must know of the samples; nothing waits for the device."""

    def act(self, H: Any, sums: Sums) -> Sums:  # noqa: ANN401
        """What it must know besides, once that has been added up over workers."""

    def turn(self, H: Any, sums: Sums) -> Any:  # noqa: ANN401
        """Fold them in, all of it on the host; or samples to be looked at again."""


def is_planned(tracker: Tracker) -> TypeGuard[PlannedTracker]:
    """Whether a tracker is of this package; one of the user's need not be."""
    return hasattr(tracker, "look")
