"""Samples of a weight matrix as the products they are: rows are never formed.

    G[b] = Σ_t l[b, t] r[b, t]ᵀ                                    (n, m)

over the positions t of sample b: one for a vector, the words of a text, the places of
an image. Shapes: weight (n, m), B samples, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
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


@dataclass(slots=True, eq=False)
class Maps:
    """The channels of an image, position by position.

    Attributes:
        x: Shape (B, size, ...).
    """

    x: Tensor

    @property
    def num_samples(self) -> int:
        """B."""
        return self.x.shape[0]

    @property
    def num_positions(self) -> int:
        """T."""
        return prod(self.x.shape[2:])

    @property
    def size(self) -> int:
        """Number of channels."""
        return self.x.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The image."""
        return (self.x,)

    def times(self, M: Tensor) -> Tensor:
        """X M, shape (B, T, c), channels first in memory."""
        return (M.T @ self.x.flatten(2).to(M.dtype)).mT

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C, shape (size, c)."""
        return (self.x.flatten(2).to(C.dtype) @ C).sum(0)

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T)."""
        return self.x.square().sum(1).flatten(1)

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size)."""
        return self.x.flatten(2).mT


@dataclass(slots=True, eq=False)
class Patches:
    """What a convolution's kernel sees of an image, position by position.

    M then is c kernels: X M is a convolution with them, and Xᵀ C is the gradient of
    their weights.

    Attributes:
        x: Shape (B, channels, ...).
        kernel: Its size in space.
        stride: Steps between positions.
        padding: Zeros around the image.
        dilation: Steps between the kernel's points.
    """

    x: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """B."""
        return self.x.shape[0]

    @property
    def places(self) -> tuple[int, ...]:
        """Positions along each dimension of space."""
        sizes = zip(
            self.x.shape[2:],
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            strict=True,
        )
        return tuple(
            (x + 2 * pad - gap * (k - 1) - 1) // step + 1
            for x, k, step, pad, gap in sizes
        )

    @property
    def num_positions(self) -> int:
        """T."""
        return prod(self.places)

    @property
    def size(self) -> int:
        """Channels times the points of the kernel."""
        return self.x.shape[1] * prod(self.kernel)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The image."""
        return (self.x,)

    def times(self, M: Tensor) -> Tensor:
        """X M, shape (B, T, c), channels first in memory."""
        kernels = M.T.reshape(-1, self.x.shape[1], *self.kernel)
        return self._convolved(self.x.to(M.dtype), kernels)

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C, shape (size, c)."""
        maps = C.mT.unflatten(2, self.places).contiguous()
        x = self.x.to(C.dtype)
        zeros = (0,) * len(self.kernel)
        shape = (maps.shape[1], x.shape[1], *self.kernel)
        weight = x.new_empty(shape)  # only its shape is read
        mask = [False, True, False]
        geometry = (self.stride, self.padding, self.dilation, False, zeros, 1)
        _, grad, _ = torch.ops.aten.convolution_backward(
            maps, x, weight, None, *geometry, mask
        )
        return grad.flatten(1).T

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T)."""
        ones = self.x.new_ones(1, 1, *self.kernel)
        return self._convolved(self.x.square().sum(1, keepdim=True), ones)[:, :, 0]

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size), positions last in memory."""
        around = [p for pad in reversed(self.padding) for p in (pad, pad)]
        x = F.pad(self.x, around)
        steps = x.stride()[2:]
        # A window for each position, of which all but the ends overlap.
        windows = x.as_strided(
            (*x.shape[:2], *self.kernel, *self.places),
            (
                *x.stride()[:2],
                *(s * gap for s, gap in zip(steps, self.dilation, strict=True)),
                *(s * step for s, step in zip(steps, self.stride, strict=True)),
            ),
        )
        return windows.reshape(len(x), self.size, -1).mT

    def _convolved(self, x: Tensor, kernels: Tensor) -> Tensor:
        convolution = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        maps = convolution(x, kernels, None, self.stride, self.padding, self.dilation)
        return maps.flatten(2).mT


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
