"""The rows of a tall matrix that one process holds, and what needs those of all.

A tracker's decisions and small matrices depend on D-dimensional things through sums
over the D rows alone. So where the rows are split over workers, each adds up its own,
``total`` adds up the workers, and all go on with the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    """Rows ``start`` to ``stop`` of D; none of them where the two are equal.

    Attributes:
        dim: D.
        start: First row held.
        stop: Behind the last row held.
        total: Adds up small tensors over all workers; the same result on each.
        collect: Brings the rows (n, ...) of all workers together, (D, ...).
    """

    dim: int
    start: int
    stop: int
    total: Total = alone
    collect: Callable[[Tensor], Tensor] = as_it_is

    @staticmethod
    def whole(dim: int) -> "Shard":
        """All D rows in one process."""
        return Shard(dim, 0, dim)

    @property
    def num_rows(self) -> int:
        """How many rows are held."""
        return self.stop - self.start
