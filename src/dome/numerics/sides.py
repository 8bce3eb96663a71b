"""The two sides of a weight matrix' samples, known by what they multiply.

Shapes: vectors x[b, t] of B samples with T positions each, side by side X; c columns.
One for a vector, the words of a text, the places of an image (``image_sides``). The
one-hot vectors of words are never written down: X M and Xᵀ C do without.

No side is ever changed; they are not frozen because that takes twice as long to make.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor


class Side(Protocol):
    """Vectors x[b, t] of length ``size``, B samples with T positions each."""

    @property
    def num_samples(self) -> int:
        """B."""

    @property
    def num_positions(self) -> int:
        """T."""

    @property
    def size(self) -> int:
        """Length of a vector."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held by reference, and must not change until it is used."""

    def times(self, M: Tensor) -> Tensor:
        """X M of M (size, c), shape (B, T, c)."""

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C of C (B, T, c), summed over samples and positions, shape (size, c)."""

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T) or what broadcasts to it."""

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size)."""


@dataclass(slots=True, eq=False)
class Vectors:
    """A side as it is: the inputs of a linear map, or the gradients of its outputs.

    Attributes:
        x: Shape (B, T, size).
    """

    x: Tensor

    @property
    def num_samples(self) -> int:
        """B."""
        return self.x.shape[0]

    @property
    def num_positions(self) -> int:
        """T."""
        return self.x.shape[1]

    @property
    def size(self) -> int:
        """Length of a vector."""
        return self.x.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The vectors."""
        return (self.x,)

    def times(self, M: Tensor) -> Tensor:
        """X M, shape (B, T, c)."""
        return self.x.to(M.dtype) @ M

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C, shape (size, c)."""
        return self.x.flatten(0, 1).T.to(C.dtype) @ C.flatten(0, 1)

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T)."""
        return self.x.square().sum(2)

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size)."""
        return self.x


@dataclass(slots=True, eq=False)
class OneHot:
    """The words of a text: a one in the place of each.

    Attributes:
        index: Shape (B, T).
        size: Number of words there are.
    """

    index: Tensor
    size: int

    @property
    def num_samples(self) -> int:
        """B."""
        return self.index.shape[0]

    @property
    def num_positions(self) -> int:
        """T."""
        return self.index.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The words."""
        return (self.index,)

    def times(self, M: Tensor) -> Tensor:
        """The rows of M that are named, shape (B, T, c)."""
        return M[self.index]

    def transposed_times(self, C: Tensor) -> Tensor:
        """C added up by word, shape (size, c)."""
        total = C.new_zeros(self.size, C.shape[2])
        return total.index_add_(0, self.index.flatten(), C.flatten(0, 1))

    def squares(self) -> Tensor:
        """One, for every position."""
        return torch.ones((), device=self.index.device)

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size), in integers."""
        return F.one_hot(self.index, self.size)


@dataclass(slots=True, eq=False)
class Units:
    """A one in the place of each position, the same for all samples.

    So a sample that is a matrix already is the product of these and its own rows.

    Attributes:
        num_samples: B.
        size: How many positions there are.
    """

    num_samples: int
    size: int

    @property
    def num_positions(self) -> int:
        """T."""
        return self.size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None."""
        return ()

    def times(self, M: Tensor) -> Tensor:
        """M for every sample, shape (1, T, c)."""
        return M.unsqueeze(0)

    def transposed_times(self, C: Tensor) -> Tensor:
        """C added up over samples, shape (T, c)."""
        return C.sum(0)

    def squares(self) -> Tensor:
        """One, for every position."""
        return torch.ones(())

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, T)."""
        return torch.eye(self.size).expand(self.num_samples, -1, -1)
