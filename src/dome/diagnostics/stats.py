"""What a step of the filter did, in numbers.

Shapes: samples g_b (D,), b = 1..B; the basis U (D, K), block-diagonal when layer-wise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.diagnostics.signal import from_squares
from dome.trackers import Tracker, Update


@dataclass(frozen=True, slots=True)
class FilterStats:
    """A record of the last step.

    Attributes:
        step: Steps taken so far.
        fraction: The paper's mean over samples of ‖U Uᵀ g_b‖ / ‖g_b‖, before filtering,
            at the last step that took samples; NaN before the first.
        kept_norm: ‖filtered g‖ / ‖g‖, before anything in ``after``; 1 while warming up.
        removed_share: How much of ‖g‖² was removed, 1 − kept_norm².
        signal_to_noise: Of the batch gradient before filtering, at the last step that
            took samples: estimates of ‖μ‖² over tr Σ / B (``SignalToNoise``). Negative
            where noise hides the signal.
        signal_to_noise_after: The same of g − U Uᵀ g. The basis has seen the samples,
            so that this is what the filter did to them, not what it would do to others.
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
    removed_share: float
    signal_to_noise: float
    signal_to_noise_after: float
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
    fraction = drift = before = after = math.nan
    if updates:
        # The projector is block-diagonal: squared norms add over blocks.
        captured = torch.stack([u.captured for u in updates]).sum(dim=0)
        total = torch.stack([u.total for u in updates]).sum(dim=0)
        fraction = float(captured_fraction(captured, total))
        before, after = _signal_to_noise(updates, captured, total)
        drift = float(torch.stack([u.drift for u in updates]).square().mean().sqrt())
    return FilterStats(
        step=step,
        fraction=fraction,
        kept_norm=kept_norm,
        removed_share=1 - kept_norm**2,
        signal_to_noise=before,
        signal_to_noise_after=after,
        effective_rank=sum(t.effective_rank for t in trackers),
        drift=drift,
        skipped_updates=max(t.num_skipped for t in trackers),
        orthogonality_error=max(t.orthogonality_error for t in trackers),
        seconds=seconds,
    )


def _signal_to_noise(
    updates: Sequence[Update], captured: Tensor, total: Tensor
) -> tuple[float, float]:
    """Signal over noise before the filter and after it; NaN where it is not known.

    Args:
        updates: One a block.
        captured: ‖Uᵀ g_b‖² over all blocks, shape (B,).
        total: ‖g_b‖² over all blocks, shape (B,).
    """
    means = [m for u in updates for m in (u.mean_total, u.mean_captured)]
    known = [float(m) for m in means if m is not None]
    if len(total) < 2 or len(known) < len(means):
        return math.nan, math.nan
    length, inside = math.fsum(known[::2]), math.fsum(known[1::2])
    B, all_, kept = len(total), float(total.sum()), float((total - captured).sum())
    before = from_squares(all_ - B * length, length, B)
    after = from_squares(kept - B * (length - inside), length - inside, B)
    return before.ratio, after.ratio
