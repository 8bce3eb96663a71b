"""What a step of the filter did, in numbers.

Shapes: samples g_b (D,), b = 1..B; the basis U (D, K), block-diagonal when layer-wise.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.diagnostics.averages import AveragedNumbers, Averages
from dome.diagnostics.signal import fraction_of
from dome.trackers import Tracker, Update

WELL_BELOW = 0.5  # of the rank


@dataclass(frozen=True, slots=True)
class FilterStats:
    """A record of the last step.

    Attributes:
        step: Steps taken so far.
        fraction: The paper's mean over samples of ‖U Uᵀ g_b‖ / ‖g_b‖, before filtering,
            at the last step that took samples; NaN before the first. With
            ``direction_rank``, at the last that measured norms, the second and every
            20th after it, with the span from before it, of this worker's samples.
        kept_norm: ‖filtered g‖ / ‖g‖, before anything in ``after``; 1 while warming up.
        removed_share: How much of ‖g‖² was removed, 1 − kept_norm².
        signal: Of the batch gradient before filtering: an estimate of ‖μ‖², averaged
            over the last 100 steps. Negative where noise hides it; NaN before the
            second step with samples.
        noise: The same of tr Σ / B.
        signal_to_noise: ``signal / noise``.
        signal_to_noise_after: The same of what the filter keeps, of batches that the
            span had not seen. Above ``signal_to_noise``, the filter removes more noise
            than signal.
        noise_scale_inside: Gradient noise scale tr Σ / ‖μ‖² of what the filter removes,
            in samples of the data: the size of a batch whose mean has as much noise as
            signal. Averaged like the two above; infinite where no signal shows.
        noise_scale_outside: The same of what the filter keeps.
        bytes_factor: 1 / mean of kept_norm² over the last 100 filtered steps: how many
            times harder an unbiased compressor may compress behind the filter, for as
            much noise as without it. NaN before the first.
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
    signal: float
    noise: float
    signal_to_noise: float
    signal_to_noise_after: float
    noise_scale_inside: float
    noise_scale_outside: float
    bytes_factor: float
    effective_rank: float
    drift: float
    skipped_updates: int
    orthogonality_error: float
    seconds: float


def collect_stats(
    trackers: Sequence[Tracker],
    step: int,
    norms: tuple[Tensor, Tensor] | None,
    seconds: float,
    averages: Averages,
) -> FilterStats:
    """Put the records of all blocks together; the device is asked once.

    Args:
        trackers: One per block.
        step: Steps taken so far.
        norms: ‖g‖ before and after the filter; None before the first step.
        seconds: What the last step took.
        averages: Over the steps so far.
    """
    updates = [t.last_update for t in trackers if t.last_update is not None]
    # A block that left the newest batch out still has the record of an older one.
    updates = [u for u in updates if u.total.shape == updates[-1].total.shape]
    asked = averages.asked()
    if norms is not None:
        asked |= {"before": norms[0], "after": norms[1]}
    if updates:
        asked |= _sums_over_blocks(updates)
    for i, update in enumerate(t.last_update for t in trackers):
        if update is not None and update.effective_rank is not None:
            asked[f"rank {i}"] = update.effective_rank
        if update is not None and update.orthogonality_error is not None:
            asked[f"error {i}"] = update.orthogonality_error
    known = _numbers(asked)
    before, after = known.get("before", 1.0), known.get("after", 1.0)
    kept = after / before if before > 0 else 1.0
    averaged = AveragedNumbers.of(known)
    return FilterStats(
        step=step,
        fraction=known.get("fraction", math.nan),
        kept_norm=kept,
        removed_share=1 - kept**2,
        signal=averaged.signal,
        noise=averaged.noise,
        signal_to_noise=averaged.ratio,
        signal_to_noise_after=averaged.ratio_outside,
        noise_scale_inside=averaged.scale_inside,
        noise_scale_outside=averaged.scale_outside,
        bytes_factor=averaged.bytes_factor,
        effective_rank=sum(
            # Asked for one by one only where the record does not have it.
            known.get(f"rank {i}") or tracker.effective_rank
            for i, tracker in enumerate(trackers)
        ),
        drift=known.get("drift", math.nan),
        skipped_updates=max(t.num_skipped for t in trackers),
        orthogonality_error=max(
            # Not get(), which would ask the device all the same.
            known[name] if name in known else t.orthogonality_error  # noqa: SIM401
            for name, t in ((f"error {i}", t) for i, t in enumerate(trackers))
        ),
        seconds=seconds,
    )


def _sums_over_blocks(updates: Sequence[Update]) -> dict[str, Tensor]:
    """The projector is block-diagonal: squared norms add up over blocks."""
    captured = torch.stack([u.captured for u in updates]).sum(dim=0)
    total = torch.stack([u.total for u in updates]).sum(dim=0)
    return {
        "fraction": fraction_of(captured, total),
        "drift": torch.stack([u.drift for u in updates]).square().mean().sqrt(),
    }


def _numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """All of them in one question to the device."""
    if not scalars:
        return {}
    numbers = torch.stack([scalar.double() for scalar in scalars.values()]).tolist()
    return dict(zip(scalars, numbers, strict=True))


def warn_of_random_directions(trackers: Sequence[Tracker], num_steps: int) -> None:
    """Say it if most of what is removed was not determined by samples.

    Args:
        trackers: Those that fill up what samples leave open with random directions.
        num_steps: How many steps have removed it.
    """
    rank = sum(len(tracker.eigenvalues) for tracker in trackers)
    known = sum(tracker.effective_rank for tracker in trackers)
    if known < WELL_BELOW * rank:
        warnings.warn(
            f"after {num_steps} filtered steps, samples have determined {known:.0f} of "
            f"{rank} directions: the others are random, and are removed all the same. "
            f"An update adds at most one less than it has samples: use a smaller rank, "
            f"larger batches, or warmup=..., steps that only watch",
            RuntimeWarning,
            stacklevel=2,
        )
