"""Which batches are let in, and with what weight.

Shapes: G (B, D), one sample per row.
"""

import warnings
from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from dome.numerics.shard import Shard

MIN_SAMPLES = 2  # one sample has no centred covariance


def check_whole(**values: object) -> None:
    """Refuse what is no whole number, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


class Intake:
    """Checks batches, counts them, and weighs the newest against the past.

    Args:
        dim: Number of columns D that samples must have.
        rank: Number of directions that will be removed.
        oversample: Number of directions that are tracked besides.
        forget: None for the average over all batches, or the weight of the newest.
        shard: The columns that samples have here, if other workers hold the others.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        oversample: int,
        forget: float | None,
        shard: Shard | None,
    ) -> None:
        check_whole(dim=dim, rank=rank, oversample=oversample)
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if not 1 <= rank <= dim:
            raise ValueError(
                f"rank must be between 1 and the number of parameters {dim}, got {rank}"
            )
        if oversample < 0:
            raise ValueError(f"oversample must not be negative, got {oversample}")
        if forget is not None and not 0 < forget < 1:
            raise ValueError(
                f"forget must be None (average over all batches) or lie strictly "
                f"between 0 and 1, got {forget}"
            )
        if shard is not None and shard.dim != dim:
            raise ValueError(f"the shard is one of {shard.dim} rows, dim is {dim}")
        self.shard = Shard.whole(dim) if shard is None else shard
        self.num_columns = rank + min(oversample, dim - rank)
        self._forget = forget
        self.num_updates = 0
        self.num_skipped = 0

    def weights(self) -> tuple[float, float]:
        """Weight of the past and of the next batch; the first batch has no past."""
        newest = 1 / (self.num_updates + 1)
        if self._forget is not None and self.num_updates > 0:
            newest = self._forget
        return 1 - newest, newest

    def check(self, grads: Tensor) -> None:
        """Refuse samples that are no batch (B, D) of numbers."""
        num = self.shard.num_rows
        if grads.dim() != 2 or grads.shape[1] != num:
            raise ValueError(
                f"samples must have shape (B, {num}), one gradient per row, got "
                f"{tuple(grads.shape)}"
            )
        if not grads.is_floating_point():
            raise ValueError(f"samples must be floating point, got {grads.dtype}")

    def admits(self, num_samples: int) -> bool:
        """Whether a batch is large enough; one that is not is counted."""
        if num_samples < MIN_SAMPLES:
            self._skip("a batch of one sample has no covariance")
        return num_samples >= MIN_SAMPLES

    def accepts(self, is_finite: float) -> bool:
        """Whether a batch is let in; either way it is counted."""
        if not is_finite:
            self._skip("a sample is not finite")
            return False
        self.num_updates += 1
        return True

    def _skip(self, reason: str) -> None:
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

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the counters back."""
        self.num_updates = int(state["num_updates"])
        self.num_skipped = int(state["num_skipped"])
