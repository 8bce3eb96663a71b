"""The rows of a tall matrix that one process holds, and what needs those of all.

A tracker's decisions and small matrices depend on D-dimensional things through sums
over the D rows alone. So where the rows are split over workers, each adds up its own,
``total`` adds up the workers, and all go on with the same numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Small float64 sums over this process' rows -> the same over all rows.
Total = Callable[..., tuple[Tensor, ...]]


def alone(*sums: Tensor) -> tuple[Tensor, ...]:
    """The sums of a process that holds all rows: what they are."""
    return sums


def as_it_is(rows: Tensor) -> Tensor:
    """The rows of a process that holds all of them: what they are."""
    return rows


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of D rows, in order; perhaps none of them.

    Attributes:
        dim: D.
        ranges: The rows held, from first to last.
        total: Adds up small tensors over all workers; the same result on each.
        collect: Brings the rows (n, ...) of all workers together, (D, ...).
    """

    dim: int
    ranges: tuple[slice, ...]
    total: Total = alone
    collect: Callable[[Tensor], Tensor] = as_it_is

    @staticmethod
    def whole(dim: int) -> "Shard":
        """All D rows in one process."""
        return Shard(dim, (slice(0, dim),))

    @property
    def num_rows(self) -> int:
        """How many rows are held."""
        return sum(part.stop - part.start for part in self.ranges)

    def held_of(self, whole: Tensor) -> Tensor:
        """Of all rows (D, ...), those held here, (n, ...)."""
        if len(self.ranges) == 1:
            return whole[self.ranges[0]]
        return torch.cat([whole[part] for part in self.ranges] or [whole[:0]])

    def meet(
        self, blocks: Iterable[slice]
    ) -> Iterator[tuple[slice, list[tuple[slice, slice]]]]:
        """Where blocks of the D rows, in order, meet those held here.

        Yields:
            Each block, with pairs: some of its rows, counted from its first, and where
            these lie among the rows held.
        """
        remaining, here = list(reversed(self.ranges)), 0
        for block in blocks:
            meetings = []
            while remaining and remaining[-1].start < block.stop:
                part = remaining.pop()
                stop = min(part.stop, block.stop)
                first, num = part.start - block.start, stop - part.start
                meetings.append((slice(first, first + num), slice(here, here + num)))
                here += num
                if stop < part.stop:
                    remaining.append(slice(stop, part.stop))
            yield block, meetings
