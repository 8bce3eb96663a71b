"""Which worker holds which part of the flat gradient.

D numbers are cut into P ranges of equal length, the last ones shorter or empty; a basis
of a block is held where the block's numbers are, so a worker may hold none of it.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from dome.parameters import Block


@dataclass(frozen=True, slots=True)
class Split:
    """D numbers over P workers.

    Attributes:
        dim: D.
        num_workers: P.
    """

    dim: int
    num_workers: int

    @property
    def length(self) -> int:
        """Numbers of a worker, those of the last ones filled up."""
        return -(-self.dim // self.num_workers)

    def range_of(self, worker: int) -> slice:
        """What a worker holds of the D numbers."""
        first, last = worker * self.length, (worker + 1) * self.length
        return slice(min(first, self.dim), min(last, self.dim))

    def lengths(self) -> list[int]:
        """How many numbers each worker holds."""
        ranges = (self.range_of(worker) for worker in range(self.num_workers))
        return [part.stop - part.start for part in ranges]

    def rows_of(self, block: Block, worker: int) -> slice:
        """Which of a block's own rows a worker holds."""
        held = self.range_of(worker)
        first = min(max(held.start, block.start), block.stop)
        last = max(min(held.stop, block.stop), first)
        return slice(first - block.start, last - block.start)

    def filled(self, vector: Tensor) -> Tensor:
        """A tensor (D, ...) filled up with zeros to P equal lengths."""
        missing = self.length * self.num_workers - self.dim
        return pad(vector, (0, 0) * (vector.dim() - 1) + (0, missing))
