"""The sample of every entry by number, where no regular layout says it.

Indexing scatters the rows of a batch: tokens sent to an expert, nodes of several graphs
in one matrix, packed sequences. A tensor of ids follows them through the same indexing,
on the same device. Shapes: B samples, N rows.
"""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

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
