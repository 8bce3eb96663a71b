"""Samples of a weight matrix as the products they are: rows are never formed.

    G[b] = Σ_t l[b, t] r[b, t]ᵀ                                    (n, m)

over the positions t of sample b: one for a vector, the words of a text, the places of
an image. Shapes: weight (n, m), B samples, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod

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
    def num_numbers(self) -> int:
        """How many numbers are held, where rows would be B n m."""
        return sum(t.numel() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return (*self.left.tensors, *self.right.tensors)

    def rows(self, room: Tensor | None = None) -> Tensor:
        """G, multiplied out after all, shape (B, n, m); in ``room`` if that is given.

        Args:
            room: At least B n m numbers of its type, to be written to.
        """
        right = self.right.written_out()
        left = self.left.written_out().to(right.dtype).mT
        if room is None or room.dtype != right.dtype:
            return left @ right
        shape = (len(left), left.shape[1], right.shape[2])
        return torch.bmm(left, right, out=room[: prod(shape)].view(shape))

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

    def rows(self, room: Tensor | None = None) -> Tensor:
        """Rows (b, n·m) of these samples; formed in ``room`` if that is given."""
        if isinstance(self.grads, Product):
            return self.grads.rows(room).flatten(1)
        return self.grads

    @property
    def num_formed(self) -> int:
        """How many numbers are to be formed."""
        if isinstance(self.grads, Product):
            product = self.grads
            return len(product) * product.left.size * product.right.size
        return 0


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

    def rows_of(self, start: int, room: Tensor | None = None) -> Tensor:
        """The rows (B, n·m) of a parameter that has some, multiplied out.

        Args:
            start: Its first column.
            room: Space that may be used for them: see ``room``.
        """
        uses = self.uses[start]
        first = uses[0].rows(room if len(uses) == 1 else None)
        if len(uses) == 1 and len(first) == len(self):
            return first
        dtype = reduce(torch.promote_types, [use.grads.dtype for use in uses])
        rows = first.new_zeros(len(self), first.shape[1], dtype=dtype)
        for use in uses:
            rows[use.samples] += use.rows()
        return rows

    def room(self, like: Tensor) -> Tensor:
        """Space for the rows of any one parameter that are to be formed."""
        sizes = [use.num_formed for uses in self.uses.values() for use in uses]
        return like.new_empty(max(sizes, default=0))

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest type that samples were computed in."""
        kinds = {use.grads.dtype for uses in self.uses.values() for use in uses}
        return max(kinds, key=lambda kind: torch.finfo(kind).eps)
