"""What a worker of ``fully_shard`` holds of the flat gradient.

Letters: D numbers in the gradient, P workers, n of the D numbers held by a worker, K
columns of a basis. FSDP2 cuts every parameter along its first dimension into P chunks,
the last ones shorter or empty. So a worker holds one range of each parameter, and the
D numbers keep the order of ``model.parameters()``, whatever P is.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dome.distributed.workers import Workers
from dome.numerics.shard import Shard
from dome.parameters import Block, Layout, Slot


def chunk_length(shape: Sequence[int], num_workers: int) -> int:
    """Numbers in a worker's chunk of a parameter, filled up to that of the first."""
    return -(-shape[0] // num_workers) * prod(shape[1:])


def chunk_of(slot: Slot, worker: int, num_workers: int) -> slice:
    """A worker's range of a parameter, among the D numbers."""
    length = chunk_length(slot.shape, num_workers)
    ends = (slot.start + worker * length, slot.start + (worker + 1) * length)
    return slice(*(min(end, slot.stop) for end in ends))


class Placement:
    """Moves gradients and bases between ``.grad`` and what is held here.

    Args:
        layout: The parameters that are filtered, all of them DTensors.
        workers: The P workers.
    """

    def __init__(self, layout: Layout, workers: Workers) -> None:
        self._layout, self._workers = layout, workers
        self._ranges = [
            [chunk_of(slot, worker, workers.size) for slot in layout.slots]
            for worker in range(workers.size)
        ]
        self.columns: list[slice] = []  # of each parameter, among the numbers held
        for part in self._ranges[workers.rank]:
            start = self.columns[-1].stop if self.columns else 0
            self.columns.append(slice(start, start + part.stop - part.start))
        self.num_held = self.columns[-1].stop
        self.gathers = False  # whether the rows of bases are collected in a state
        self.receiver: int | None = None  # who collects them; None for all

    def place(self, block: Block) -> tuple[slice, Shard]:
        """Which of the numbers held here are a block's, and which of its rows."""
        chosen = self._members(block)
        ranges = [
            tuple(
                slice(parts[i].start - block.start, parts[i].stop - block.start)
                for i in chosen
            )
            for parts in self._ranges
        ]
        columns = slice(self.columns[chosen[0]].start, self.columns[chosen[-1]].stop)

        def collect(rows: Tensor) -> Tensor:
            return self._whole(rows, block.dim, ranges) if self.gathers else rows

        total, rank = self._workers.total, self._workers.rank
        return columns, Shard(block.dim, ranges[rank], total, collect)

    def _whole(
        self, rows: Tensor, dim: int, ranges: Sequence[Sequence[slice]]
    ) -> Tensor:
        """The rows of all workers in their order, (dim, K); none if for another."""
        lengths = [sum(part.stop - part.start for part in parts) for parts in ranges]
        arrived = self._workers.collect(rows, lengths, "basis", self.receiver)
        if len(arrived) < dim:
            return arrived
        whole, start = torch.empty_like(arrived), 0
        for part in (part for parts in ranges for part in parts):
            stop = start + part.stop - part.start
            whole[part] = arrived[start:stop]
            start = stop
        return whole

    def gather(self) -> Tensor:
        """What is held here of the gradient, shape (n,); a missing one is zero."""
        layout = self._layout
        vector = torch.zeros(self.num_held, dtype=layout.dtype, device=layout.device)
        for p, columns in zip(layout.parameters, self.columns, strict=True):
            if p.grad is not None:
                vector[columns] = local(p.grad).reshape(-1)
        return vector

    def scatter_(self, vector: Tensor) -> None:
        """Write what is held here of a gradient, (n,), to ``.grad``."""
        for p, columns in zip(self._layout.parameters, self.columns, strict=True):
            if p.grad is not None:
                grad = local(p.grad)
                grad.copy_(vector[columns].view_as(grad))

    def split(self, rows: Tensor, block: Block) -> dict[str, Tensor]:
        """A block's basis, of which (n, K) are held here, as DTensors by parameter.

        Each is cut as the parameter is, and has its shape and one dimension more, of
        the K columns.
        """
        from torch.distributed.tensor import DTensor  # slow to import

        parts: dict[str, Tensor] = {}
        num_columns, first = rows.shape[1], 0
        for i in self._members(block):
            p: Any = self._layout.parameters[i]
            held = rows[first : first + p.to_local().numel()]
            first += len(held)
            shape = torch.Size((*p.shape, num_columns))
            parts[self._layout.slots[i].name] = DTensor.from_local(
                held.reshape(*p.to_local().shape, num_columns).clone(),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
        return parts

    def joined(self, parts: Mapping[str, Tensor], block: Block) -> Tensor:
        """The rows held here, (n, K), of a basis that ``split`` made, or whole ones."""
        rows = []
        for i in self._members(block):
            part, slot = parts[self._layout.slots[i].name], self._layout.slots[i]
            if hasattr(part, "to_local"):
                rows.append(local(part).reshape(-1, part.shape[-1]))
            else:
                chunk = self._ranges[self._workers.rank][i]
                here = slice(chunk.start - slot.start, chunk.stop - slot.start)
                rows.append(part.reshape(-1, part.shape[-1])[here])
        return torch.cat(rows)

    def _members(self, block: Block) -> list[int]:
        """Which parameters are a block's."""
        return [
            i
            for i, slot in enumerate(self._layout.slots)
            if block.start <= slot.start and slot.stop <= block.stop
        ]


@torch.no_grad()
def local(tensor: Any) -> Tensor:  # noqa: ANN401 (a DTensor, which is slow to import)
    """What this worker holds of a DTensor: its own memory."""
    held: Tensor = tensor.to_local()
    return held
