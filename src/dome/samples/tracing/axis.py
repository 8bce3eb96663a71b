"""Where the samples lie inside a tensor: along one dimension, or entry by entry.

``Axis`` is the regular layout. A dimension of size outer·B·inner holds B samples when
index i belongs to sample (i // inner) mod B. A plain batch dimension has outer = inner
= 1; ``(B·T, E)`` has inner = T; ``(T·B, E)``, which attention makes of time-major
input, has outer = T.

``Labels`` is for everything else. Indexing scatters the rows of a batch: tokens sent to
an expert, nodes of several graphs in one matrix, packed sequences. A tensor of ids, on
the same device, names the sample of every entry. Shapes: B samples, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from dome.samples.tracing.nested import Value

NOBODY = -1  # the id of an entry that belongs to no sample, such as a row of zeros


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Which sample each entry of a tensor belongs to.

    Attributes:
        ids: As many dimensions as the tensor, of its size or 1: it broadcasts.
        batch: B, the number of samples.
    """

    ids: Tensor
    batch: int
    _packing: dict[tuple[int, ...], "_Packing"] = field(default_factory=dict)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions along which the sample changes."""
        return tuple(d for d, size in enumerate(self.ids.shape) if size > 1)

    @property
    def last(self) -> int:
        """The last of them; -1 if the whole tensor is one sample's."""
        return max(self.dims, default=-1)

    @property
    def rows_only(self) -> bool:
        """Whether samples change along the first dimension alone."""
        return self.last < 1

    def deeper(self) -> "Labels":
        """The same samples with one dimension more at the end."""
        return Labels(self.ids.unsqueeze(-1), self.batch)

    def labels(self, x: Tensor) -> "Labels":
        """These: they hold for x."""
        del x
        return self

    def is_whole(self, rows: Tensor) -> bool:
        """Whether row b is sample b: nobody knows without asking the device."""
        del rows
        return False

    def samples_first(self, x: Tensor) -> Tensor:
        """Entries of x (..., last) by sample, (B, T, last), zeros where one has less.

        T is asked of the device, once for each indexing.
        """
        packing = self._packing.get(x.shape[:-1])
        if packing is None:
            ids = self.ids.select(-1, 0).expand(x.shape[:-1])
            packing = self._packing[x.shape[:-1]] = _Packing.of(ids, self.batch)
        return packing.padded(x.reshape(-1, x.shape[-1]))

    def fold(self, rows: Tensor) -> Tensor:
        """Sum rows (N, ...) to samples (B, ...)."""
        ids = self.ids.reshape(len(self.ids), -1)[:, 0].expand(len(rows))
        return sum_by_id(rows, ids, self.batch)


@dataclass(frozen=True, slots=True, eq=False)
class _Packing:
    """Where each of N rows goes in a table (B, T) of the rows of each sample."""

    place: Tensor
    batch: int
    length: int

    @classmethod
    def of(cls, ids: Tensor, batch: int) -> "_Packing":
        ids = _without_nobody(ids.reshape(-1), batch)
        order = ids.argsort(stable=True)
        counts = ids.new_zeros(batch + 1).index_add_(0, ids, torch.ones_like(ids))
        starts = counts.cumsum(0) - counts
        rank = torch.empty_like(ids)
        rank[order] = torch.arange(len(ids), device=ids.device) - starts[ids[order]]
        length = max(int(counts[:batch].max()), 1)
        # Rows of nobody share the slot behind the table, which is cut off.
        place = torch.where(ids < batch, ids * length + rank, batch * length)
        return cls(place, batch, length)

    def padded(self, rows: Tensor) -> Tensor:
        room = rows.new_zeros(self.batch * self.length + 1, rows.shape[1])
        room.index_copy_(0, self.place, rows)
        return room[:-1].view(self.batch, self.length, -1)


def sum_by_id(rows: Tensor, ids: Tensor, batch: int) -> Tensor:
    """Rows (N, ...) summed to their samples (B, ...); those of nobody are left out."""
    room = rows.new_zeros(batch + 1, *rows.shape[1:])
    return room.index_add_(0, _without_nobody(ids, batch), rows)[:batch]


def _without_nobody(ids: Tensor, batch: int) -> Tensor:
    return torch.where(ids < 0, batch, ids)


def merged(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two ids of the same entries as one, and whether they contradict each other."""
    clash = ((a != b) & (a >= 0) & (b >= 0)).any()
    return torch.where(a < 0, b, a), clash


def collapsed(ids: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """The one sample along these dimensions (kept, of size 1); whether it is not one.

    What belongs to nobody does not count.
    """
    dims = tuple(d for d in dims if ids.shape[d] > 1)
    if not dims:
        return ids, None
    one = ids.amax(dims, keepdim=True)
    return one, ((ids != one) & (ids >= 0)).any()


def either(*doubts: Tensor | None) -> Tensor | None:
    """Whether any of these doubts is true; None without any."""
    found = None
    for doubt in doubts:
        if doubt is not None:
            found = doubt if found is None else found | doubt
    return found


def compact(ids: Tensor) -> Tensor:
    """Ids with dimensions that a view repeats (stride 0) cut to size 1."""
    for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True)):
        if size > 1 and stride == 0:
            ids = ids.narrow(dim, 0, 1)
    return ids


def reshaped(ids: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """The ids of a tensor of shape ``old`` after a reshape to ``new``."""
    touched = [d for d, size in enumerate(ids.shape) if size > 1]
    if not touched or not prod(old):
        return ids.reshape(-1)[:1].view((1,) * len(new))
    first, stop = touched[0], touched[-1] + 1
    before, after = prod(old[:first]), prod(old[stop:])
    start = _longest(new, before)
    end = len(new) - _longest(new[::-1], after)
    outer, inner = before // prod(new[:start]), after // prod(new[end:])
    own = ids.expand(*ids.shape[:first], *old[first:stop], *ids.shape[stop:])
    middle = own.reshape(1, -1, 1).expand(outer, -1, inner)
    ones = (1,) * start, (1,) * (len(new) - end)
    return middle.reshape(*ones[0], *new[start:end], *ones[1])


def _longest(sizes: tuple[int, ...], total: int) -> int:
    """How many leading sizes, multiplied, still divide ``total``."""
    count = product = 0
    product = 1
    for size in sizes:
        if not size or total % (product * size):
            break
        product *= size
        count += 1
    return count


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
        if not prod(new):  # without entries every dimension of that size will do
            held = [d for d, n in enumerate(new) if n == old[self.dim]]
            return self.moved(held[0]) if held else None
        stride = self.inner * prod(old[self.dim + 1 :])
        after = prod(new)
        for dim, size in enumerate(new):
            before, after = after, after // max(size, 1)
            if after and stride % after == 0 and before % (stride * self.batch) == 0:
                return Axis(dim, self.batch, stride // after)
        return Axis(0, 1) if self.batch == 1 and len(new) else None


def indexed_axis(x: Tensor, index: Value, axis: Axis) -> Axis | None:
    """Axis of ``x[index]`` for integers, slices, None, ... and one tensor elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    consumed = sum(_width(i) for i in index)
    dim = place = 0
    for i in index:
        width = x.ndim - consumed if i is Ellipsis else _width(i)
        if dim <= axis.dim < dim + width:
            untouched = i is Ellipsis or _is_whole(i, x.shape[axis.dim])
            return axis.moved(place + axis.dim - dim) if untouched else None
        dim += width
        place += width if i is Ellipsis else _places(i)
    return axis.moved(place + axis.dim - dim)


def assigned_axis(
    target: Tensor, index: Value, value: Tensor, axis: Axis
) -> Axis | None:
    """Where ``target[index] = value`` puts the samples, if that is clear."""
    place = target[index].ndim - value.ndim + axis.dim
    for dim in range(target.ndim):
        held = axis.moved(dim)
        if held.fits(target.shape):
            found = indexed_axis(target, index, held)
            if found is not None and found.dim == place:
                return held
    return None


def _is_whole(i: Value, size: int) -> bool:
    """Whether an index is a slice that leaves a dimension of this size as it is."""
    if not isinstance(i, slice) or isinstance(i.start, Tensor):
        return False
    return not isinstance(i.stop, Tensor) and i.indices(size) == (0, size, 1)


def _width(i: Value) -> int:
    """Dimensions of the indexed tensor that an index takes."""
    if i is None or i is Ellipsis:
        return 0
    boolean = isinstance(i, Tensor) and i.dtype == torch.bool
    return i.ndim if boolean else 1


def _places(i: Value) -> int:
    """Dimensions of the result that an index leaves."""
    if isinstance(i, Tensor):
        return 1 if i.dtype == torch.bool else i.ndim
    return int(i is None or isinstance(i, slice | list))
