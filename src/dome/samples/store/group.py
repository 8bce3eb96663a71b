"""The rows of one backward pass for the samples of one batch size."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dome.parameters import Slot
from dome.samples.store.wanted import Pass


class Group:
    """Rows (B, D), filled one parameter at a time.

    Args:
        buffer: At least as many rows as are needed.
        num_rows: B.
        task: The backward pass.
    """

    def __init__(self, buffer: Tensor, num_rows: int, task: int) -> None:
        self.buffer = buffer
        self.rows = buffer[:num_rows]
        self.task = task
        self.written: set[int] = set()
        self.passes: set[Pass] = set()
        self._coarse: dict[int, torch.dtype] = {}

    def view(self, slot: Slot) -> Tensor:
        """The columns of a parameter, shape (B, *parameter)."""
        columns = self.rows.narrow(1, slot.start, slot.stop - slot.start)
        if len(slot.shape) == 1:
            return columns
        return columns.view(len(columns), *slot.shape)

    def add(self, slot: Slot, grads: Tensor, dtype: torch.dtype) -> None:
        """Write a first contribution (B, *parameter), add a later one.

        Args:
            slot: The parameter.
            grads: What to write.
            dtype: The type it was computed in.
        """
        if slot.start in self.written:
            self.view(slot).add_(grads)
        else:
            self.view(slot).copy_(grads)
            self.written.add(slot.start)
        if torch.finfo(dtype).eps > torch.finfo(self.dtype_of(slot)).eps:
            self._coarse[slot.start] = dtype

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """The coarsest type in which the rows of a parameter were computed."""
        return self._coarse.get(slot.start, self.rows.dtype)

    def finish(self, slots: Iterable[Slot]) -> None:
        """Clear the columns of parameters that this backward pass left out."""
        for slot in slots:
            if slot.start not in self.written:
                self.view(slot).zero_()

    def absorb(self, other: "Group", slots: Iterable[Slot]) -> None:
        """Add the rows of another group, of the same samples."""
        self.passes |= other.passes
        for slot in slots:
            if slot.start in other.written:
                self.add(slot, other.view(slot), other.dtype_of(slot))


def by_samples(groups: Sequence[Group], slots: Sequence[Slot]) -> list[Group]:
    """Groups that hold the same samples added up, the others as they are.

    A second ``backward()`` through a forward pass is about the same samples, and so is
    one through later passes that go on from it.
    """
    apart: list[Group] = []
    for group in groups:
        same = [
            known
            for known in apart
            if len(known.rows) == len(group.rows) and known.passes & group.passes
        ]
        if not same:
            apart.append(group)
            continue
        for other in (*same[1:], group):
            same[0].absorb(other, slots)
        apart = [known for known in apart if known not in same[1:]]
    return apart
