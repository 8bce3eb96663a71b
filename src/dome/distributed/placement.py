"""What a worker of ``fully_shard`` holds of the flat gradient.

Letters: D numbers in the gradient, P workers, n of the D numbers held by a worker.
FSDP2 cuts every parameter along its first dimension into P chunks, the last ones
shorter or empty. So a worker holds one range of each parameter, and the D numbers keep
the order of ``model.parameters()``, whatever P is.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from dome.distributed.workers import Workers
from dome.masks import here
from dome.parameters import Block, Layout, Slot
from dome.trackers.linalg import Shard


def chunk_length(shape: Sequence[int], num_workers: int) -> int:
    """Numbers in a worker's chunk of a parameter, filled up to that of the first."""
    return -(-shape[0] // num_workers) * prod(shape[1:])


class Placement:
    """Which numbers of each parameter every worker holds.

    Args:
        layout: The parameters that are filtered, all of them DTensors.
        workers: The P workers.
    """

    def __init__(self, layout: Layout, workers: Workers) -> None:
        self._layout, self._workers = layout, workers
        # Of each parameter, for each worker, counted from the parameter's first number.
        self._chunks = [self._chunks_of(slot) for slot in layout.slots]
        self.columns: list[slice] = []  # of each parameter, among the numbers held
        start = 0
        for chunks in self._chunks:
            stop = start + _len(chunks[workers.rank])
            self.columns.append(slice(start, stop))
            start = stop
        self.num_held = start

    def _chunks_of(self, slot: Slot) -> list[slice]:
        P, num = self._workers.size, slot.stop - slot.start
        ends = [min(p * chunk_length(slot.shape, P), num) for p in range(P + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def place(self, block: Block) -> tuple[slice, dict[str, Any]]:
        """Which of the numbers held here are a block's, and which of its rows."""
        chosen = self.members(block)
        ranges = []
        for i in chosen:
            first = self._layout.slots[i].start - block.start
            part = self.part(i)
            ranges.append(slice(first + part.start, first + part.stop))
        columns = slice(self.columns[chosen[0]].start, self.columns[chosen[-1]].stop)
        return columns, {"shard": Shard(block.dim, tuple(ranges), self._workers.total)}

    def members(self, block: Block) -> list[int]:
        """Which parameters are a block's."""
        slots = enumerate(self._layout.slots)
        return [i for i, slot in slots if block.start <= slot.start < block.stop]

    def part(self, i: int, by_row: bool = False) -> slice:
        """The numbers of a parameter that are held here, or its rows."""
        return self._parts(i, by_row)[self._workers.rank]

    def _parts(self, i: int, by_row: bool) -> list[slice]:
        width = prod(self._layout.slots[i].shape[1:]) if by_row else 1
        return [slice(c.start // width, c.stop // width) for c in self._chunks[i]]

    def collected(
        self, held: Tensor, chosen: Sequence[int], by_row: bool, only: int | None
    ) -> Tensor:
        """What workers hold of some parameters, below each other in their order.

        Args:
            held: Rows for what is held here of these parameters.
            chosen: Which they are.
            by_row: Whether there is one for a row of a parameter, or for a number.
            only: The worker that gets it, the others get less; None for all.
        """
        parts = [self._parts(i, by_row) for i in chosen]
        lengths = [sum(map(_len, mine)) for mine in zip(*parts, strict=True)]
        arrived = self._workers.collect(held, lengths, "basis", only)
        if len(arrived) < sum(lengths):
            return arrived
        # Worker by worker, what it has of each parameter; then parameter by parameter.
        pieces = iter(
            arrived.split(
                [_len(mine[p]) for p in range(len(lengths)) for mine in parts]
            )
        )
        by_worker = [[next(pieces) for _ in chosen] for _ in lengths]
        return torch.cat([piece for of in zip(*by_worker, strict=True) for piece in of])

    def gather(self) -> Tensor:
        """What is held here of the gradient, shape (n,); a missing one is zero."""
        layout = self._layout
        vector = torch.zeros(self.num_held, dtype=layout.dtype, device=layout.device)
        for p, columns in zip(layout.parameters, self.columns, strict=True):
            if p.grad is not None:
                vector[columns] = here(p.grad).reshape(-1)
        return vector

    def scatter_(self, vector: Tensor) -> None:
        """Write what is held here of a gradient, (n,), to ``.grad``."""
        for p, columns in zip(self._layout.parameters, self.columns, strict=True):
            if p.grad is not None:
                grad = here(p.grad)
                grad.copy_(vector[columns].view_as(grad))


def _len(part: slice) -> int:
    return int(part.stop - part.start)
