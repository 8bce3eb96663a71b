"""What every tracker does with a batch before it looks inside.

Shapes: G (B, D), one sample a row.
"""

import warnings

import torch
from torch import Tensor

from dome.numerics.shard import Shard

MIN_SAMPLES = 2  # one sample has no centred covariance


class Intake:
    """Checks batches, counts them, and weighs the newest against the past.

    Args:
        dim: Number of columns D that samples must have.
        rank: Number of directions that will be tracked.
        forget: None for the average over all batches, or the weight of the newest.
        shard: The columns that samples have here, if other workers hold the others.
    """

    def __init__(
        self, dim: int, rank: int, forget: float | None, shard: Shard | None = None
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if not 1 <= rank <= dim:
            raise ValueError(
                f"rank must be between 1 and the number of parameters {dim}, got {rank}"
            )
        if forget is not None and not 0 < forget < 1:
            raise ValueError(
                f"forget must be None (average over all batches) or lie strictly "
                f"between 0 and 1, got {forget}"
            )
        if shard is not None and shard.dim != dim:
            raise ValueError(f"the shard is one of {shard.dim} rows, dim is {dim}")
        self.num_columns = dim if shard is None else shard.num_rows
        self.forget = forget
        self.num_updates = 0
        self.num_skipped = 0

    def weights(self) -> tuple[float, float]:
        """Weight of the past and of the next batch; the first batch has no past."""
        newest = 1 / (self.num_updates + 1)
        if self.forget is not None and self.num_updates > 0:
            newest = self.forget
        return 1 - newest, newest

    def admits(self, grads: Tensor) -> bool:
        """Whether a batch (B, D) is large enough; raises if its shape is wrong."""
        if grads.dim() != 2 or grads.shape[1] != self.num_columns:
            raise ValueError(
                f"samples must have shape (B, {self.num_columns}), one gradient a row, "
                f"got {tuple(grads.shape)}"
            )
        if not grads.is_floating_point():
            raise ValueError(f"samples must be floating point, got {grads.dtype}")
        return self.admits_number(len(grads))

    def admits_number(self, num_samples: int) -> bool:
        """Whether a batch of so many samples is large enough."""
        if num_samples < MIN_SAMPLES:
            self.skip("a batch of one sample has no covariance")
            return False
        return True

    def skip(self, reason: str) -> None:
        """Count a batch that was left out, and say so the first time."""
        self.num_skipped += 1
        if self.num_skipped == 1:
            warnings.warn(
                f"dome left a batch out of the basis: {reason}. Further ones are "
                f"counted in skipped_updates without a warning.",
                RuntimeWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Counters as tensors."""
        return {
            "num_updates": torch.tensor(self.num_updates),
            "num_skipped": torch.tensor(self.num_skipped),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the counters back."""
        self.num_updates = int(state["num_updates"])
        self.num_skipped = int(state["num_skipped"])
