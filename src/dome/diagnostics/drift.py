"""How far a tracked subspace turns in n steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome.diagnostics.angles import principal_angles
from dome.torch_private import own_arithmetic
from dome.trackers import Tracker


class Drift:
    """Principal angles between the bases of a filter n steps apart.

    Keeps one copy of the basis. Call ``observe`` after every step:

        drift = Drift(every=50)
        angles = drift.observe(grad_filter.trackers)

    Args:
        every: n, the steps from one comparison to the next.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._every = every
        self._before: dict[str, Tensor] | None = None
        self._num_seen = 0

    @own_arithmetic
    def observe(self, trackers: Mapping[str, Tracker]) -> Tensor | None:
        """Take note of a step; every n-th one is compared with the n-th before.

        Args:
            trackers: ``.trackers`` of a ``GradientFilter``.

        Returns:
            The angles of all blocks, smallest first, shape (K,), in radians; None where
            nothing is compared.
        """
        seen, self._num_seen = self._num_seen, self._num_seen + 1
        if seen % self._every:
            return None
        if self._before is None:
            self._before = {name: t.basis.clone() for name, t in trackers.items()}
            return None
        angles = []
        for name, tracker in trackers.items():
            before, now = self._before[name], tracker.basis
            angles.append(principal_angles(before, now))
            before.copy_(now)
        # The projector is block-diagonal: its angles are those of the blocks.
        return torch.cat(angles).sort().values


def rms_sine(angles: Tensor) -> float:
    """Root mean square sine of angles (K,), in [0, 1], as ``stats.drift`` has it."""
    return float(angles.sin().square().mean().sqrt())
