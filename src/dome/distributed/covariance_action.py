"""The update from the covariance action, where workers have many samples each.

Letters: D parameters, W tracked columns, P workers, B_p samples of a worker. Instead of
its samples, B_p D numbers, each worker sends its part of the action Hᵀ V (D, W), of
which every worker gets the rows of its shard, and gets the new U back: 2 D W numbers,
and 2 D for the mean and the gradient.
For that, every worker keeps a whole copy of U, and has a part of the action beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dome.distributed.resharding import Movement
from dome.distributed.workers import Workers
from dome.numerics.linalg import (
    LONG_MEAN,
    Products,
    coefficients,
    compute_dtype,
    squared_norms,
)
from dome.trackers import StreamingPower


class Action:
    """Turns a basis that is split over workers by samples that stay where they are.

    Args:
        tracker: This worker's rows of the basis.
        movement: Between whole and split.
        workers: The P workers.
    """

    def __init__(
        self, tracker: StreamingPower, movement: Movement, workers: Workers
    ) -> None:
        self._tracker, self._movement, self._workers = tracker, movement, workers
        columns = tracker.columns
        self._width, self._dtype = columns.shape[1], compute_dtype(columns.dtype)
        self._whole: Tensor | None = None

    def is_cheaper(self, counts: Sequence[int]) -> bool:
        """Whether it sends less than the samples of so many rows a worker would be."""
        # W columns there and W back, and two for the mean and the gradient, which
        # samples would carry along.
        columns = 2 * self._width + 2
        return sum(counts) > columns * self._workers.size

    def forget(self) -> None:
        """Drop the copy of U: the basis has changed in another way."""
        self._whole = None

    def update(self, rows: Tensor, counts: Sequence[int], scale: float) -> bool:
        """Fold the samples ``scale * rows`` of all workers into the basis.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
            scale: This worker's factor.

        Returns:
            Whether it was done. A mean much longer than the deviations costs digits
            here; then nothing is done, and samples should be moved.
        """
        if self._tracker.may_be_mended:
            self.forget()
        if not self._tracker.prepare(sum(counts)):
            return True
        seen = self._see(rows, counts, scale)
        if seen.is_finite() and seen.mean_is_long(LONG_MEAN):
            return False
        start = sum(counts[: self._workers.rank])
        V = (scale * seen.V[start : start + len(rows)]).to(self._dtype)
        action = self._movement.scattered(rows.to(self._dtype).T @ V, "samples")

        def measure() -> Tensor:
            self.forget()
            return self._coordinates(rows, counts, scale)[:, :-1]

        self._tracker.update_from_action(seen, action, measure)
        return True

    def _see(self, rows: Tensor, counts: Sequence[int], scale: float) -> Products:
        """What the samples of all workers have in common with U: V and ‖g_b‖²."""
        measured = self._coordinates(rows, counts, scale)
        GU, squares = measured[:, :-1], measured[:, -1]
        total = scale * rows.sum(dim=0) / sum(counts)
        mean = self._movement.scattered(total, "samples")
        (mu2,) = self._workers.total(torch.linalg.vecdot(mean, mean).double())
        return Products(
            V=GU - GU.mean(dim=0),
            m=GU.mean(dim=0),
            # Of ‖g_b‖² = K + 2 Hμ + ‖μ‖² only sums are used: Hμ sums to nothing.
            K=squares - mu2,
            Hmu=torch.zeros_like(squares),
            mu2=mu2,
        )

    def _coordinates(self, rows: Tensor, counts: Sequence[int], scale: float) -> Tensor:
        """G U and ‖g_b‖² of all workers' samples, float64, shape (B, W + 1)."""
        if self._whole is None:
            self._whole = self._movement.whole(self._tracker.columns, "samples")
        own = scale * coefficients(self._whole, rows)
        squares = scale**2 * squared_norms(rows)
        both = torch.cat([own, squares[:, None]], dim=1)
        return self._workers.collect(both, counts, "sums")
