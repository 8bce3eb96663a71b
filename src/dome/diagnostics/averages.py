"""Running averages of what a single step tells too little about.

Letters: samples g_b (D,), b = 1..B, of mean μ and covariance Σ; n samples of the data
in each, one but with micro-batches and workers' gradients; U the span that is removed.

    tr Σ ≈ Σ_b ‖g_b − ḡ‖² / (B − 1),   ‖μ‖² ≈ ‖ḡ‖² − tr Σ / B,   scale = n tr Σ / ‖μ‖²

The ratio of one batch is useless: both are averaged first (McCandlish et al., "An
empirical model of large-batch training", 2018).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dome.trackers import Tracker
from dome.trackers.protocol import Squares

STEPS = 100  # that an average is over, the newest weighing most
KEPT = 1 - 1 / STEPS


class Averages:
    """What a filter averages over its last steps: six numbers of noise, and kept_norm².

    A number that is not finite is left out.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as after loading another state."""
        self._sums: Tensor | None = None  # and sums of weights, shape (2, 7)

    def note(
        self,
        trackers: Sequence[Tracker],
        norms: tuple[Tensor, Tensor],
        samples_per_row: float,
        to_mean: float,
        *,
        is_filtered: bool,
    ) -> None:
        """Count a step; nothing waits for the device.

        Args:
            trackers: One for each block.
            norms: ‖g‖ before and after the filter.
            samples_per_row: n.
            to_mean: What turns g into the mean of samples, in norm.
            is_filtered: Whether anything was removed.
        """
        before, after = norms
        found = [_taken(tracker) for tracker in trackers]
        squares = [s for s in found if s is not None]
        if len(squares) == len(trackers) and squares[0].num_samples > 1:
            noise = noise_of(squares, before * to_mean, samples_per_row)
        else:
            noise = before.new_full((6,), math.nan)
        kept = after / before if is_filtered else before.new_full((), math.nan)
        values = torch.cat([noise.to(kept.dtype), kept.square()[None]])
        known = values.isfinite()
        new = torch.stack([values.where(known, 0.0), known.to(values.dtype)])
        self._sums = new if self._sums is None else new.add_(self._sums, alpha=KEPT)

    def asked(self) -> dict[str, Tensor]:
        """What ``AveragedNumbers`` needs from the device."""
        if self._sums is None:
            return {}
        means = self._sums[0] / self._sums[1]
        return {f"average {i}": mean for i, mean in enumerate(means)}


@dataclass(frozen=True, slots=True)
class AveragedNumbers:
    """The averaged fields of ``FilterStats``, NaN where nothing was counted.

    Attributes:
        signal: ‖μ‖² of the mean of a batch.
        noise: tr Σ / B of it.
        ratio: Signal over noise.
        ratio_outside: The same outside U.
        scale_inside: Noise scale inside U.
        scale_outside: The same outside U.
        bytes_factor: 1 / mean of kept_norm².
    """

    signal: float
    noise: float
    ratio: float
    ratio_outside: float
    scale_inside: float
    scale_outside: float
    bytes_factor: float

    @staticmethod
    def of(known: Mapping[str, float]) -> "AveragedNumbers":
        """From what ``Averages.asked`` asked for."""
        trace, signal, noise, trace_out, signal_out, noise_out, kept = (
            known.get(f"average {i}", math.nan) for i in range(7)
        )
        return AveragedNumbers(
            signal=signal + signal_out,
            noise=noise + noise_out,
            ratio=_over(signal + signal_out, noise + noise_out),
            ratio_outside=_over(signal_out, noise_out),
            scale_inside=_over(max(trace, 0.0), max(signal, 0.0)),
            scale_outside=_over(max(trace_out, 0.0), max(signal_out, 0.0)),
            bytes_factor=_over(1.0, kept),
        )


def noise_of(squares: Sequence[Squares], length: Tensor, num: float) -> Tensor:
    """Estimates of n tr Σ, ‖μ‖² and tr Σ / B, inside U and outside of it: 6 numbers.

    Args:
        squares: Of all blocks.
        length: ‖μ‖, where blocks do not know it.
        num: n.
    """
    B = squares[0].num_samples
    values = squares[0].values
    if len(squares) > 1:
        values = torch.stack([s.values for s in squares]).sum(0)
    if not all(s.has_mean for s in squares):
        mean, (total, inside, _, mean_inside) = length.square(), values
        values = torch.stack([total - B * mean, inside, mean, mean_inside])
    return _estimates(B, num, values.dtype, values.device) @ values


@lru_cache(maxsize=8)
def _estimates(B: int, num: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same as a matrix, shape (6, 4): one product instead of a dozen."""
    spread, mean = torch.eye(2, dtype=torch.float64)
    trace = spread / (B - 1)
    one = torch.stack([num * trace, mean - trace / B, trace / B])  # of spread, mean
    inside = torch.stack([torch.zeros_like(one), one], dim=2).flatten(1)
    both = torch.stack([one, torch.zeros_like(one)], dim=2).flatten(1)
    return torch.cat([inside, both - inside]).to(device, dtype)


def _taken(tracker: Tracker) -> Squares | None:
    """Of the newest batch, so that no other step counts it too."""
    squares: Squares | None = getattr(tracker, "newest_squares", None)
    if squares is not None:
        tracker.newest_squares = None  # type: ignore[attr-defined] # one of ours
    return squares


def _over(number: float, other: float) -> float:
    """A quotient: infinite over zero, NaN of nothing."""
    if other:
        return number / other
    return math.inf if number > 0 else math.nan
