"""Samples of a weight matrix as the products they are: rows are never formed.

    G[b] = Σ_t l[b, t] r[b, t]ᵀ                                    (n, m)

over the positions t of sample b: one for a vector, the words of a text, the places of
an image. Shapes: weight (n, m), B samples, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dome.numerics.sides import OneHot, Side
from dome.torch_private import version_of


@dataclass(frozen=True, slots=True)
class Product:
    """Samples G[b] = Σ_t l[b, t] r[b, t]ᵀ of one use of a weight matrix (n, m).

    Attributes:
        left: n-vectors.
        right: m-vectors.
    """

    left: Side
    right: Side
    _versions: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        versions = tuple(version_of(t) for t in self._tensors)
        object.__setattr__(self, "_versions", versions)

    def __len__(self) -> int:
        return self.right.num_samples

    @property
    def num_positions(self) -> int:
        """T."""
        return self.right.num_positions

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in."""
        return self.right.tensors[0].dtype

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody wrote to the tensors that are held."""
        versions = tuple(version_of(t) for t in self._tensors)
        return versions == self._versions

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

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.left.tensors, *self.right.tensors)


@dataclass(frozen=True, slots=True)
class Use:
    """What some of a batch's samples are for one parameter.

    Attributes:
        samples: Which they are.
        grads: Rows (B, n·m), or a product.
    """

    samples: slice
    grads: Tensor | Product


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
    def of_rows(rows: Tensor, pieces: Sequence[tuple[int, int]]) -> "FactorBatch":
        """Samples that are rows (B, D), of pieces from a column to another."""
        every = slice(0, len(rows))
        uses = {a: [Use(every, rows[:, a:b])] for a, b in pieces}
        return FactorBatch(len(rows), uses)

    def of(self, start: int) -> list[Use]:
        """What adds up to the samples of a parameter."""
        return self.uses.get(start, [])
