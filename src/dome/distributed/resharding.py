"""What moves between workers that hold shards: samples, gradients, parts of states.

Letters: D parameters, P workers, B samples of all workers together, n of the D numbers
held by a worker.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.distributed.split import Split
from dome.distributed.workers import Workers
from dome.parameters import Block

SPLIT = "basis"  # the entry of a tracker's state that has a row for every parameter


class Movement:
    """Moves vectors and samples between whole and split.

    Args:
        dim: D.
        workers: The P workers.
    """

    def __init__(self, dim: int, workers: Workers) -> None:
        self.split = Split(dim, workers.size)
        self.held = self.split.range_of(workers.rank)
        self.num_held = self.held.stop - self.held.start
        self._workers = workers

    def samples(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in the columns held here, shape (B, n), worker by worker.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
        """
        workers = range(self._workers.size)
        parts = [rows[:, self.split.range_of(worker)] for worker in workers]
        lengths = [num_rows * self.num_held for num_rows in counts]
        arrived = self._workers.exchange(parts, lengths, "samples")
        return arrived.view(sum(counts), self.num_held)

    def scattered(self, tensor: Tensor, kind: str) -> Tensor:
        """Of the sum of tensors (D, ...) over workers, the rows held here, (n, ...)."""
        filled = self.split.filled(tensor)
        return self._workers.scatter_sum(filled, kind)[: self.num_held]

    def whole(self, shard: Tensor, kind: str) -> Tensor:
        """The whole (D, ...) of what each worker holds of it, (n, ...)."""
        missing = self.split.length - len(shard)
        filled = pad(shard, (0, 0) * (shard.dim() - 1) + (0, missing))
        return self._workers.gather(filled, kind)[: self.split.dim]

    def whole_state(
        self, block: Block, state: Mapping[str, Tensor], only: int | None
    ) -> dict[str, Tensor]:
        """The state of a block's tracker as in one process.

        Args:
            block: Some of the D parameters.
            state: That of this worker's rows.
            only: The worker that gets the whole; None for all.
        """
        workers = range(self._workers.size)
        ranges = [self.split.rows_of(block, worker) for worker in workers]
        lengths = [rows.stop - rows.start for rows in ranges]
        collected = self._workers.collect(state[SPLIT], lengths, "basis", only)
        return {**state, SPLIT: collected}

    def own_state(self, block: Block, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the state of a block's tracker in one process, this worker's rows."""
        rows = self.split.rows_of(block, self._workers.rank)
        return {**state, SPLIT: state[SPLIT][rows.start : rows.stop]}


def describe_whole(block: Block, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A worker's state of a block, with a basis of the whole shape and no numbers."""
    shape = (block.dim, state[SPLIT].shape[1])
    dtype = state[SPLIT].dtype
    return {**state, SPLIT: torch.empty(shape, dtype=dtype, device="meta")}
