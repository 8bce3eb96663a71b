"""The rows of one backward pass for the samples of one batch size."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dome.parameters import Slot
from dome.samples.store.factors import FactorGroup
from dome.samples.store.wanted import Pass
from dome.trackers.factors import Product


class Group:
    """Rows (B, D), filled one parameter at a time.

    Args:
        buffer: At least as many rows as are needed.
        num_rows: B.
        task: The backward pass.
        first: The first column, if there are those of a layer only.
    """

    def __init__(
        self, buffer: Tensor, num_rows: int, task: int, first: int = 0
    ) -> None:
        self.buffer = buffer
        self._first = first
        self.rows = buffer[:num_rows]
        self.num_rows = num_rows
        self.task = task
        self.written: set[int] = set()
        self.passes: set[Pass] = set()
        self._coarse: dict[int, torch.dtype] = {}

    def view(self, slot: Slot) -> Tensor:
        """The columns of a parameter, shape (B, *parameter)."""
        start = slot.start - self._first
        columns = self.rows.narrow(1, start, slot.stop - slot.start)
        if len(slot.shape) == 1:
            return columns
        return columns.view(self.num_rows, *slot.shape)

    def room(self, slot: Slot, dtype: torch.dtype, zero: bool) -> Tensor | None:
        """The columns of a parameter (B, *parameter), to be written by the caller.

        None if they hold a contribution already, or numbers of another type. With
        ``zero`` they are cleared, and offered for later contributions too.
        """
        fresh = slot.start not in self.written
        if self.rows.dtype != dtype or not (fresh or zero):
            return None
        self.written.add(slot.start)
        view = self.view(slot)
        return view.zero_() if zero and fresh else view

    def keep(self, slot: Slot, product: Product) -> bool:
        """Whether samples are taken as a product: here they are rows."""
        del slot, product
        return False

    def parts(self, slot: Slot, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum of a parameter's rows, and their lengths: see ``audit``."""
        rows = self.view(slot)
        # They are as wide as the widest parameter of the model.
        wide = torch.promote_types(rows.dtype, kind)
        return rows.sum(0, dtype=kind), torch.linalg.vector_norm(rows, dtype=wide)

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
        coarsest = self._coarse.get(slot.start, self.rows.dtype)
        if dtype != coarsest and torch.finfo(dtype).eps > torch.finfo(coarsest).eps:
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


AnyGroup = Group | FactorGroup
G = TypeVar("G", Group, FactorGroup)


def by_samples(groups: Sequence[G], slots: Sequence[Slot]) -> list[G]:
    """Groups that hold the same samples added up, the others as they are.

    A second ``backward()`` through a forward pass is about the same samples, and so is
    one through later passes that go on from it.
    """
    apart: list[G] = []
    for group in groups:
        same: list[G] = [
            known
            for known in apart
            if known.num_rows == group.num_rows and known.passes & group.passes
        ]
        if not same:
            apart.append(group)
            continue
        others = same[1:]
        others.append(group)
        for other in others:
            same[0].absorb(other, slots)
        apart = [known for known in apart if known not in same[1:]]
    return apart
