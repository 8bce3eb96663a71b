"""What the tracked subspace looks like at the end of an epoch.

Shapes: U (D, K) the basis of a block, V (D, K) an older one.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dome import GradientFilter
from dome.diagnostics.angles import principal_angles
from dome_lab.paper.rows import Row

NUM_LEADING = 200  # eigenvalues that are kept; a file of rows stays small
NUM_DIGITS = 5
MOST_MEMORY = 2**28  # bytes of older bases; to keep larger ones would be a cost


class SubspaceWatch:
    """Tells the spectrum, and how far the subspace turned since it was last asked."""

    def __init__(self) -> None:
        self._before: list[Tensor] | None = None

    @torch.no_grad()
    def look(self, grad_filter: GradientFilter | None) -> Row:
        """Leading eigenvalues, largest first, and the drift in degrees.

        The drift is the largest principal angle between the subspaces of this and of
        the last call, over all blocks. It is None at the first call, or where bases are
        too large to keep one for the next.

        Args:
            grad_filter: Whose subspace to look at; without one, both are None.
        """
        if grad_filter is None:
            return {"eigenvalues": None, "drift": None}
        trackers = list(grad_filter.trackers.values())
        values = torch.cat([t.eigenvalues.double().cpu() for t in trackers])
        leading = values.sort(descending=True).values[:NUM_LEADING]
        return {
            "eigenvalues": [float(f"{v:.{NUM_DIGITS}g}") for v in leading.tolist()],
            "drift": self._drift([tracker.basis for tracker in trackers]),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The bases of the last call, by their place."""
        return {str(place): U for place, U in enumerate(self._before or [])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Compare with the bases of a call before."""
        self._before = [state[str(place)] for place in range(len(state))] or None

    def _drift(self, bases: list[Tensor]) -> float | None:
        if sum(U.numel() * U.element_size() for U in bases) > MOST_MEMORY:
            return None
        before, self._before = self._before, [U.clone() for U in bases]
        if before is None:
            return None
        return max(map(_angle, before, bases))


def _angle(V: Tensor, U: Tensor) -> float:
    """Largest principal angle of two orthonormal bases (D, K), in degrees."""
    if not bool(U.isfinite().all()):
        return math.nan
    return math.degrees(principal_angles(V, U)[-1])
