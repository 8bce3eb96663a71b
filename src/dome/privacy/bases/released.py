"""A basis from past noised gradients: post-processing, which costs no privacy."""

import torch
from torch import Tensor

from dome.privacy.bases.protocol import Release, Setting, another_basis, load_tracker
from dome.trackers import Tracker

NUM_RELEASED, NUM_WINDOWS, RECENT = "num_released", "num_windows", "recent."


class Released:
    """Directions of past releases: post-processing, which costs no privacy.

    Sums that were filtered have nothing in span(U), and nobody could learn from them
    that U should turn. So on every n-th step samples are clipped as they are, the basis
    learns from the noised sum, and the filter is applied to that sum. On the steps
    between, samples are filtered before they are clipped.

    Args:
        tracker: Follows the covariance of releases.
        window: How many releases make one batch of samples.
        update_every: Learns on every n-th step.
    """

    moment_basis = None

    def __init__(
        self, tracker: Tracker, window: int = 8, update_every: int = 1
    ) -> None:
        if window < 2:
            raise ValueError(f"window must be at least 2 releases, got {window}")
        self._tracker, self._update_every = tracker, update_every
        self._window, self._recent = window, list[Tensor]()
        self._num_steps = self._num_updates = 0

    @classmethod
    def made(cls, given: Setting) -> "Released":
        """The basis of a setting."""
        return cls(given.tracker(), given.window, given.options.update_every)

    @property
    def filters_first(self) -> bool:
        """True on the steps from which nothing is learned."""
        return self._num_steps % self._update_every != 0

    def prepare(self) -> None:
        """All it learns from is there already."""

    def directions(self) -> Tensor | None:
        """U of the tracker, once it has seen releases."""
        return self._tracker.basis if self._num_updates else None

    def learn(self, release: Release) -> None:
        """Keep a release of samples that were not filtered; enough of them turn U."""
        if not self.filters_first:
            self._recent.append(release.gradient.clone())
        self._num_steps += 1
        if len(self._recent) == self._window:
            self._tracker.update(torch.stack(self._recent))
            self._recent.clear()
            self._num_updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The tracker's state, and the releases that wait."""
        own = {
            NUM_RELEASED: torch.tensor(self._num_steps),
            NUM_WINDOWS: torch.tensor(self._num_updates),
        }
        waiting = {f"{RECENT}{i}": r.clone() for i, r in enumerate(self._recent)}
        return self._tracker.state_dict() | own | waiting

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the releases that were waiting."""
        waiting = {name for name in state if name.startswith(RECENT)}
        own = {NUM_RELEASED, NUM_WINDOWS}
        if not own <= state.keys():
            raise ValueError(another_basis())
        followed = state.keys() - own - waiting
        load_tracker(self._tracker, {name: state[name] for name in followed})
        self._num_steps = int(state[NUM_RELEASED])
        self._num_updates = int(state[NUM_WINDOWS])
        self._recent = [state[f"{RECENT}{i}"].clone() for i in range(len(waiting))]
