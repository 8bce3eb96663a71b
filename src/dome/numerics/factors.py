"""Samples of a weight matrix as the products they are: rows are never formed.

    G[b] = Σ_t l[b, t] r[b, t]ᵀ                                    (n, m)

over the positions t of sample b: one for a vector, the words of a text, the places of
an image. Shapes: weight (n, m), B samples, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dome.numerics.sides import OneHot, Side


@dataclass(slots=True, eq=False)  # never changed: a frozen one takes twice as long
class Product:
    """Samples G[b] = Σ_t l[b, t] r[b, t]ᵀ of one use of a weight matrix (n, m).

    Attributes:
        left: n-vectors.
        right: m-vectors.
    """

    left: Side
    right: Side

    def __len__(self) -> int:
        return self.right.num_samples

    @property
    def num_positions(self) -> int:
        """T."""
        return self.left.num_positions

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in."""
        return self.right.tensors[0].dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return (*self.left.tensors, *self.right.tensors)

    def rows(self) -> Tensor:
        """G, multiplied out after all, shape (B, n, m)."""
        right = self.right.written_out()
        return self.left.written_out().to(right.dtype).mT @ right

    def total(self) -> Tensor:
        """Σ_b G[b], shape (n, m)."""
        if isinstance(self.left, OneHot):
            return self.left.transposed_times(self.right.written_out())
        return self.right.transposed_times(self.left.written_out()).T

    def squares(self) -> Tensor:
        """Σ_bt ‖l[b, t]‖² ‖r[b, t]‖²: what rounding in ``total`` is measured by."""
        return (self.left.squares() * self.right.squares()).sum()


@dataclass(slots=True, eq=False)  # never changed, as a product
class Use:
    """What some of a batch's samples are for one parameter.

    Attributes:
        samples: Which they are.
        grads: Rows (B, n·m), or a product.
    """

    samples: slice
    grads: Tensor | Product

    def rows(self) -> Tensor:
        """Rows (b, n·m) of these samples."""
        if isinstance(self.grads, Product):
            return self.grads.rows().flatten(1)
        return self.grads


@dataclass(frozen=True, slots=True)
class FactorBatch:
    """A batch of gradient samples, parameter by parameter.

    Attributes:
        num_samples: B.
        uses: By the first column that a parameter has in the flat gradient; what adds
            up to its samples. Parameters without gradients are missing.
    """

    num_samples: int
    uses: dict[int, list[Use]]

    def __len__(self) -> int:
        return self.num_samples

    def within(self, columns: slice) -> "FactorBatch":
        """The parameters of a block, by their columns in it."""
        uses = {
            start - columns.start: uses
            for start, uses in self.uses.items()
            if columns.start <= start < columns.stop
        }
        return FactorBatch(self.num_samples, uses)

    @staticmethod
    def of_rows(rows: Tensor, columns: Mapping[int, slice]) -> "FactorBatch":
        """Samples that are rows (B, D), of parameters with these columns."""
        every = slice(0, len(rows))
        uses = {start: [Use(every, rows[:, part])] for start, part in columns.items()}
        return FactorBatch(len(rows), uses)

    def of(self, start: int) -> list[Use]:
        """What adds up to the samples of a parameter."""
        return self.uses.get(start, [])

    def rows_of(self, start: int) -> Tensor:
        """The rows (B, n·m) of a parameter that has some, by its first column."""
        uses = self.uses[start]
        first = uses[0].rows()
        if len(uses) == 1 and len(first) == len(self):
            return first
        dtype = reduce(torch.promote_types, [use.grads.dtype for use in uses])
        rows = first.new_zeros(len(self), first.shape[1], dtype=dtype)
        for use in uses:
            rows[use.samples] += use.rows()
        return rows
