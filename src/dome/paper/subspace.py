"""What the tracked subspace looks like at the end of an epoch.

Shapes: U (D, K) the basis of a block, M = VᵀU (K, K) its overlap with an older basis V.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dome.linalg import coefficients
from dome.paper.rows import Row
from dome.trackers import Tracker

NUM_LEADING = 200  # eigenvalues that are kept; a file of rows stays small
NUM_DIGITS = 5
MOST_MEMORY = 2**28  # bytes of older bases; to keep larger ones would be a cost


class SubspaceWatch:
    """Tells the spectrum, and how far the subspace turned since it was last asked.

    Args:
        trackers: One a block; none for a run without a tracker.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._before: list[Tensor] | None = None

    @torch.no_grad()
    def look(self) -> Row:
        """Leading eigenvalues, largest first, and the drift in degrees.

        The drift is the largest principal angle between the subspaces of this and of
        the last call, over all blocks. It is None at the first call, or where bases are
        too large to keep one for the next; both are None without a tracker.
        """
        if not self._trackers:
            return {"eigenvalues": None, "drift": None}
        values = torch.cat([t.eigenvalues.double().cpu() for t in self._trackers])
        leading = values.sort(descending=True).values[:NUM_LEADING]
        return {
            "eigenvalues": [float(f"{v:.{NUM_DIGITS}g}") for v in leading.tolist()],
            "drift": self._drift(),
        }

    def _drift(self) -> float | None:
        bases = [tracker.basis for tracker in self._trackers]
        if sum(U.numel() * U.element_size() for U in bases) > MOST_MEMORY:
            return None
        before, self._before = self._before, [U.clone() for U in bases]
        if before is None:
            return None
        return max(map(_angle, before, bases))


def _angle(V: Tensor, U: Tensor) -> float:
    """Largest principal angle of two orthonormal bases (D, K), in degrees.

    From the cosines, which cost K x K memory. They cannot tell angles below 0.03° apart
    in float32, far less than anybody reads off a picture.
    """
    M = coefficients(U, V.T)
    if not bool(M.isfinite().all()):
        return math.nan
    cosine = float(torch.linalg.svdvals(M)[-1].clamp(0.0, 1.0))
    return math.degrees(math.acos(cosine))
