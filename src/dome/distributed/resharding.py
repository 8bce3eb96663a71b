"""What moves between workers that hold shards: samples, gradients, rows of bases.

Letters: D parameters, P workers, B samples of all workers together, n of the D numbers
held by a worker.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.distributed.split import Split
from dome.distributed.workers import Workers
from dome.numerics.shard import Shard
from dome.parameters import Block


class Resharding:
    """Moves vectors and samples between whole and split.

    Args:
        dim: D.
        workers: The P workers.
    """

    def __init__(self, dim: int, workers: Workers) -> None:
        self._split = Split(dim, workers.size)
        self.held = self._split.range_of(workers.rank)
        self.num_held = self.held.stop - self.held.start
        self._workers = workers
        self.receiver: int | None = None  # who collects the rows of bases; None for all

    def place(self, block: Block) -> tuple[slice, Shard]:
        """Which of the numbers held here are a block's, and which of its rows."""
        rows = self._split.rows_of(block, self._workers.rank)
        start = block.start + rows.start - self.held.start
        start = start if rows.start < rows.stop else 0
        everyone = range(self._workers.size)
        ranges = [self._split.rows_of(block, worker) for worker in everyone]
        lengths = [part.stop - part.start for part in ranges]

        def collect(tensor: Tensor) -> Tensor:
            return self._workers.collect(tensor, lengths, "basis", self.receiver)

        shard = Shard(block.dim, (rows,), self._workers.total, collect)
        return slice(start, start + shard.num_rows), shard

    def samples(
        self, rows: Tensor, counts: Sequence[int], scales: Sequence[float] | None = None
    ) -> Tensor:
        """All workers' rows in the columns held here, shape (B, n), worker by worker.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
            scales: What the rows of every worker are multiplied by.
        """
        workers = range(self._workers.size)
        parts = [rows[:, self._split.range_of(worker)] for worker in workers]
        lengths = [num_rows * self.num_held for num_rows in counts]
        arrived = self._workers.exchange(parts, lengths, "samples")
        arrived = arrived.view(sum(counts), self.num_held)
        if scales is not None:
            factors = arrived.new_tensor(scales)
            numbers = torch.tensor(counts, device=factors.device)
            arrived.mul_(factors.repeat_interleave(numbers)[:, None])
        return arrived

    def scattered(self, tensor: Tensor, kind: str) -> Tensor:
        """Of the sum of tensors (D, ...) over workers, the rows held here, (n, ...)."""
        filled = self._split.filled(tensor)
        return self._workers.scatter_sum(filled, kind)[: self.num_held]

    def whole(self, shard: Tensor, kind: str) -> Tensor:
        """The whole (D, ...) of what each worker holds of it, (n, ...)."""
        missing = self._split.length - len(shard)
        filled = pad(shard, (0, 0) * (shard.dim() - 1) + (0, missing))
        return self._workers.gather(filled, kind)[: self._split.dim]
