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

    def place(self, block: Block) -> tuple[slice, dict[str, Any]]:
        """Which of the numbers held here are a block's, and which of its rows."""
        chosen = self.members(block)
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
        shard = Shard(block.dim, ranges[rank], total, collect)
        return columns, {"shard": shard}

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

    def split(self, rows: Tensor, chosen: Sequence[int]) -> dict[str, Tensor]:
        """Rows for each number held of some parameters, (n, K), as DTensors by name.

        Each is cut as the parameter is, and has its shape and one dimension more, of
        the K columns.
        """
        parts: dict[str, Tensor] = {}
        num_columns, first = rows.shape[1], 0
        for i in chosen:
            p: Any = self._layout.parameters[i]
            held = rows[first : first + p.to_local().numel()]
            first += len(held)
            held = held.reshape(*p.to_local().shape, num_columns)
            parts[self._layout.slots[i].name] = self.cut_as(i, held)
        return parts

    def cut_as(self, i: int, held: Tensor) -> Tensor:
        """A tensor with the rows of a parameter, of which some are held, as DTensor."""
        from torch.distributed.tensor import DTensor  # slow to import

        p: Any = self._layout.parameters[i]
        shape = torch.Size((p.shape[0], *held.shape[1:]))
        whole: Tensor = DTensor.from_local(
            held.clone(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return whole

    def rows_of(self, i: int) -> slice:
        """The rows of a parameter that are held here."""
        part, slot = self._ranges[self._workers.rank][i], self._layout.slots[i]
        width = prod(slot.shape[1:])
        return slice(
            (part.start - slot.start) // width, (part.stop - slot.start) // width
        )

    def held_of(self, whole: Tensor, chosen: Sequence[int]) -> Tensor:
        """Of rows for all numbers of some parameters, those for what is held here."""
        parts, first = [], 0
        for i in chosen:
            part, slot = self._ranges[self._workers.rank][i], self._layout.slots[i]
            shift = first - slot.start
            parts.append(whole[part.start + shift : part.stop + shift])
            first += slot.stop - slot.start
        return torch.cat(parts)

    def collected(self, held: Tensor, chosen: Sequence[int], by_row: bool) -> Tensor:
        """What workers hold of some parameters, below each other in their order.

        Args:
            held: Rows for what is held here of these parameters.
            chosen: Which they are.
            by_row: Whether there is one for a row of a parameter, or for a number.
        """
        ranges: list[list[slice]] = [[] for _ in self._ranges]
        first = 0
        for i in chosen:
            slot = self._layout.slots[i]
            width = prod(slot.shape[1:]) if by_row else 1
            for parts, mine in zip(self._ranges, ranges, strict=True):
                start, stop = parts[i].start - slot.start, parts[i].stop - slot.start
                mine.append(slice(first + start // width, first + stop // width))
            first += (slot.stop - slot.start) // width
        return self._whole(held, first, ranges)

    def joined(self, parts: Mapping[str, Tensor], chosen: Sequence[int]) -> Tensor:
        """The rows held here, (n, K), that ``split`` made, or whole ones."""
        rows = []
        for i in chosen:
            part, slot = parts[self._layout.slots[i].name], self._layout.slots[i]
            if hasattr(part, "to_local"):
                rows.append(local(part).reshape(-1, part.shape[-1]))
            else:
                chunk = self._ranges[self._workers.rank][i]
                here = slice(chunk.start - slot.start, chunk.stop - slot.start)
                rows.append(part.reshape(-1, part.shape[-1])[here])
        return torch.cat(rows)

    def members(self, block: Block) -> list[int]:
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
