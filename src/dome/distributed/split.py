"""Which worker of DDP holds which part of D numbers, and what moves between them.

Letters: D numbers, P workers, n of the D held by a worker, B samples of all workers
together. The D numbers are cut into P ranges of equal length, the last ones shorter or
empty. The basis of a block is held where the block's numbers are.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from dome.distributed.workers import Workers
from dome.numerics.shard import Shard
from dome.parameters import Block


class Split:
    """D numbers over P workers.

    Args:
        dim: D.
        workers: The P workers.
    """

    def __init__(self, dim: int, workers: Workers) -> None:
        self._dim, self._workers = dim, workers
        self.length = -(-dim // workers.size)  # of a worker, the last ones filled up
        starts = [min(p * self.length, dim) for p in range(workers.size)]
        self.ranges = [slice(s, min(s + self.length, dim)) for s in starts]
        self.held = self.ranges[workers.rank]
        self.num_held = self.held.stop - self.held.start
        # Who collects the rows of bases; None for all.
        self.receiver: int | None = None

    def place(self, block: Block) -> tuple[slice, dict[str, Any]]:
        """Which of the numbers held here are a block's, and which of its rows."""
        parts = []
        for held in self.ranges:
            first = min(max(held.start, block.start), block.stop)
            last = max(min(held.stop, block.stop), first)
            parts.append(slice(first - block.start, last - block.start))
        rows = parts[self._workers.rank]
        lengths = [part.stop - part.start for part in parts]

        def collect(tensor: Tensor) -> Tensor:
            return self._workers.collect(tensor, lengths, "basis", self.receiver)

        shard = Shard(block.dim, (rows,), self._workers.total, collect)
        start = max(block.start + rows.start - self.held.start, 0)
        return slice(start, start + shard.num_rows), {"shard": shard}

    def samples(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in the columns held here, shape (B, n), worker by worker.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
        """
        parts = [rows[:, part] for part in self.ranges]
        lengths = [num_rows * self.num_held for num_rows in counts]
        arrived = self._workers.exchange(parts, lengths, "samples")
        return arrived.view(sum(counts), self.num_held)

    def scattered(self, vector: Tensor, kind: str) -> Tensor:
        """Of the sum of vectors (D,) over workers, the part held here, (n,)."""
        filled = pad(vector, (0, self.length * self._workers.size - self._dim))
        return self._workers.scatter_sum(filled, kind)[: self.num_held]

    def whole(self, part: Tensor, kind: str) -> Tensor:
        """The whole vector (D,) of the parts that workers hold, (n,)."""
        filled = pad(part, (0, self.length - len(part)))
        return self._workers.gather(filled, kind)[: self._dim]
