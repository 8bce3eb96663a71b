"""Where the samples lie inside a tensor, and how to bring them to the front.

A dimension of size outer·B·inner holds B samples when index i belongs to sample
(i // inner) mod B. A plain batch dimension has outer = inner = 1; ``(B·T, E)`` has
inner = T; ``(T·B, E)``, which attention makes of time-major input, has outer = T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dome.samples.tracing.labels import Labels


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension of a tensor that enumerates the samples.

    Attributes:
        dim: The dimension, counted from the front.
        batch: B, the number of samples.
        inner: Neighbouring entries along ``dim`` that belong to the same sample.
    """

    dim: int
    batch: int
    inner: int = 1

    @property
    def last(self) -> int:
        """The last dimension along which the sample changes."""
        return self.dim

    @property
    def rows_only(self) -> bool:
        """Whether samples change along the first dimension alone."""
        return self.dim == 0

    def is_whole(self, rows: Tensor) -> bool:
        """Whether row b is sample b."""
        return rows.shape[0] == self.batch

    def deeper(self) -> "Axis":
        """The same samples with one dimension more at the end."""
        return self

    def labels(self, x: Tensor) -> Labels:
        """The same samples of x, by number."""
        steps = torch.arange(x.shape[self.dim], device=x.device)
        ids = steps.div(self.inner, rounding_mode="floor") % self.batch
        after = x.ndim - self.dim - 1
        return Labels(ids.view(*(1,) * self.dim, -1, *(1,) * after), self.batch)

    def moved(self, dim: int) -> "Axis":
        """The same samples along another dimension."""
        return self if dim == self.dim else Axis(dim, self.batch, self.inner)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape can hold the samples along ``dim``."""
        return (
            self.dim < len(shape) and shape[self.dim] % (self.batch * self.inner) == 0
        )

    def split(self, x: Tensor) -> Tensor:
        """``dim`` of x taken apart into the three dimensions (outer, B, inner)."""
        return x.unflatten(self.dim, (-1, self.batch, self.inner))

    def samples_first(self, x: Tensor) -> Tensor:
        """All entries of x but those of its last dimension, by sample: (B, T, last)."""
        # Not -1: of a layer without inputs, x has no entries to tell it from.
        shape = (self.batch, prod(x.shape[:-1]) // self.batch, x.shape[-1])
        if self.dim == 0 and x.shape[0] == self.batch * self.inner:
            return x.reshape(shape)
        return self.split(x).movedim(self.dim + 1, 0).reshape(shape)

    def fold(self, rows: Tensor) -> Tensor:
        """Sum rows (outer·B·inner, ...) to samples (B, ...)."""
        if rows.shape[0] == self.batch:
            return rows
        return rows.unflatten(0, (-1, self.batch, self.inner)).sum((0, 2))

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> "Axis | None":
        """Where the samples lie after a reshape; None if it tears them apart.

        The sample of the entry at flat position f is (f // stride) mod B, before and
        after: a reshape keeps flat positions.
        """
        stride = self.inner * prod(old[self.dim + 1 :])
        after = prod(new)
        for dim, size in enumerate(new):
            before, after = after, after // max(size, 1)
            if after and stride % after == 0 and before % (stride * self.batch) == 0:
                return Axis(dim, self.batch, stride // after)
        return Axis(0, 1) if self.batch == 1 and len(new) else None
