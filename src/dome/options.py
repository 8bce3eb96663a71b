"""What a filter does at which step: when it takes samples, how much it removes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

LOSS_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Options of a filter that depend on the number of the step alone.

    Attributes:
        update_every: Samples are taken on every n-th step.
        strength: Multiplies the removed part, in [0, 1]; or a function of the step.
        warmup: Number of first steps that only watch.
        loss_reduction: How the loss sums up samples: "mean" or "sum".
        scaler: The scaler whose factor samples carry.
    """

    update_every: int
    strength: float | Callable[[int], float]
    warmup: int
    loss_reduction: str
    scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        if self.update_every < 1:
            raise ValueError(
                f"update_every must be at least 1, got {self.update_every}"
            )
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if self.loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(
                f"loss_reduction must be one of {LOSS_REDUCTIONS}, "
                f"got {self.loss_reduction!r}"
            )
        if not callable(self.strength):
            _check_strength(self.strength)

    def takes_samples(self, step: int) -> bool:
        """Whether samples are taken at this step."""
        return step % self.update_every == 0

    def strength_at(self, step: int) -> float:
        """How much of the removed part to remove, 0 for only watching."""
        strength = self.strength
        if callable(strength):
            strength = strength(step)
            _check_strength(strength)
        return 0.0 if step < self.warmup else strength

    def sample_scale(self, num_rows: int) -> float:
        """What turns captured rows into gradients of single samples."""
        # The rows add up to the batch gradient; a mean loss divided each by their
        # number.
        scale = float(num_rows) if self.loss_reduction == "mean" else 1.0
        return scale if self.scaler is None else scale / self.scaler.get_scale()


def _check_strength(strength: float) -> None:
    if not 0 <= strength <= 1:
        raise ValueError(
            f"strength must lie between 0 (remove nothing) and 1, got {strength}"
        )
