"""What a step of the filter did, in numbers.

Shapes: samples g_b (D,), b = 1..B; the basis U (D, K), block-diagonal when layer-wise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.trackers import Tracker


@dataclass(frozen=True, slots=True)
class FilterStats:
    """A record of the last step.

    Attributes:
        step: Steps taken so far.
        fraction: The paper's mean over samples of ‖U Uᵀ g_b‖ / ‖g_b‖, before filtering,
            at the last step that took samples; NaN before the first.
        kept_norm: ‖filtered g‖ / ‖g‖, before anything in ``after``; 1 while warming up.
        effective_rank: How many of the directions the samples have determined.
        drift: Root mean square sine of the angles between the subspace before and after
            the last update, in [0, 1].
        skipped_updates: Batches left out of the basis so far (not finite, or one
            sample).
        orthogonality_error: Largest entry of |UᵀU − I| when last measured.
        seconds: Wall-clock time the filter took.
    """

    step: int
    fraction: float
    kept_norm: float
    effective_rank: float
    drift: float
    skipped_updates: int
    orthogonality_error: float
    seconds: float


def captured_fraction(captured: Tensor, total: Tensor) -> Tensor:
    """Mean of ‖U Uᵀ g_b‖ / ‖g_b‖ from the squared norms, each of shape (B,).

    A sample that is zero has nothing to capture and counts as 0.
    """
    ratio = torch.where(total > 0, captured / total, torch.zeros_like(total))
    return ratio.clamp(0.0, 1.0).sqrt().mean()


def collect_stats(
    trackers: Sequence[Tracker], step: int, kept_norm: float, seconds: float
) -> FilterStats:
    """Put the records of all blocks together."""
    updates = [t.last_update for t in trackers if t.last_update is not None]
    # A block that left the newest batch out still has the record of an older one.
    updates = [u for u in updates if u.total.shape == updates[-1].total.shape]
    fraction = drift = float("nan")
    if updates:
        # The projector is block-diagonal: squared norms add over blocks.
        captured = torch.stack([u.captured for u in updates]).sum(dim=0)
        total = torch.stack([u.total for u in updates]).sum(dim=0)
        fraction = float(captured_fraction(captured, total))
        drift = float(torch.stack([u.drift for u in updates]).square().mean().sqrt())
    return FilterStats(
        step=step,
        fraction=fraction,
        kept_norm=kept_norm,
        effective_rank=sum(t.effective_rank for t in trackers),
        drift=drift,
        skipped_updates=max(t.num_skipped for t in trackers),
        orthogonality_error=max(t.orthogonality_error for t in trackers),
        seconds=seconds,
    )
