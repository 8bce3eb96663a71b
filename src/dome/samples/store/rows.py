"""The captured rows: one (B, D) buffer a backward pass, kept from step to step.

What a sample is. Row i of a forward pass is sample i. All that backward passes
contribute for it adds up in one row:

- forward passes of one size that one ``backward()`` goes through are views of the same
  samples (two towers, a carried hidden state): 8 + 8 samples give 8 rows;
- a pass of another size holds other samples: 8 + 8 + 4 give 12 rows;
- a second ``backward()`` through the same graph is about the same samples: 4 give 4.

Forward passes of their own ``backward()`` (gradient accumulation) are other samples,
whatever their size: their rows lie one below the other.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dome.parameters import Layout, Slot
from dome.samples.store.audit import FEWEST, Audit, Entry, check_complete, entry
from dome.samples.store.factors import FactorGroup, batch_of
from dome.samples.store.gradients import Gradients, Reach, read
from dome.samples.store.sink import Pass
from dome.torch_private import current_graph_task, when_backward_ends
from dome.trackers.factors import FactorBatch, Product


class RowGroup:
    """Rows (B, D) of one backward pass, filled one parameter at a time.

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
        """Write a first contribution (B, *parameter), add a later one."""
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

    def absorb(self, other: "RowGroup", slots: Iterable[Slot]) -> None:
        """Add the rows of another group, of the same samples."""
        self.passes |= other.passes
        for slot in slots:
            if slot.start in other.written:
                self.add(slot, other.view(slot), other.dtype_of(slot))


AnyGroup = RowGroup | FactorGroup
G = TypeVar("G", RowGroup, FactorGroup)


class Rows:
    """A taker of rows: groups that wait to be taken, and the buffers they lie in.

    Args:
        layout: The parameters, and which columns are whose.
        functional: Rows are wanted of autograd.grad(), which leaves .grad alone.
        ignore_penalty: Do not ask whether rows account for all of the gradient.
        direction_rank: Keep samples as products where directions of this rank are
            best multiplied with those; ``take_factors`` then replaces ``take``.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        functional: bool = False,
        ignore_penalty: bool = False,
        direction_rank: int | None = None,
    ) -> None:
        self.layout = layout
        self._direction_rank = direction_rank
        self.keeps_products = direction_rank is not None
        self.active = True
        self.least = Reach.COMPUTES if functional else Reach.FILLS
        self._forward_seen = self._empty_seen = False
        self._groups: dict[tuple[int, int], AnyGroup] = {}
        self._spare: list[Tensor] = []
        self._spare_rows: dict[int, Tensor] = {}
        self._since_backward = Gradients(layout.parameters)
        self._since_step = Gradients(layout.parameters)
        # How many groups are void if this number on the device is 0.
        self._doubts: list[tuple[int, Tensor]] = []
        self._excused = False
        self._audit = None if ignore_penalty else Audit(layout, self._running)

    @property
    def num_waiting(self) -> int:
        """How many backward passes wait; their rows may be scaled each in its way."""
        return len(self._groups)

    def arm(self, active: bool) -> None:
        """Choose whether forward passes from now on are captured; a step is over."""
        self.active = active
        self._since_step.note()

    def begin(self, num_samples: int) -> None:
        """Note a forward pass: from now on gradients must have rows."""
        if self._groups:
            self._drop_stale()
        # No samples, no rows: the last of uneven batches.
        if num_samples:
            self._forward_seen = True
        else:
            self._empty_seen = True
        audit = self._audit
        if audit is not None and audit.is_due and self.least is Reach.FILLS:
            audit.begin()

    def group(self, source: Pass, slot: Slot) -> AnyGroup:
        """Where samples of the running backward pass and this batch size go."""
        del slot  # those of all parameters lie in one group
        task = current_graph_task()
        found = self._groups.get((task, source.batch))
        if found is None:
            found = self._begin_group(task, source.batch)
        found.passes.add(source)
        return found

    def take(self, grads: Sequence[Tensor | None] | None = None) -> Tensor | None:
        """All waiting rows (B, D), unwritten parameters as zeros; None without any.

        Waits for the device at most once.

        Args:
            grads: The gradients that the rows must account for; ``.grad`` by default.
        """
        found = cast("Sequence[RowGroup]", self._complete_groups(grads))
        groups = by_samples(found, self.layout.slots)
        for group in groups:
            group.finish(self.layout.slots)
        if len(groups) == 1:
            return groups[0].rows
        return torch.cat([group.rows for group in groups]) if groups else None

    def take_factors(self) -> FactorBatch | None:
        """All waiting samples, parameter by parameter; None without any."""
        found = cast("Sequence[FactorGroup]", self._complete_groups(None))
        groups = by_samples(found, self.layout.slots)
        return batch_of(groups, self.layout.slots) if groups else None

    def came_without(self) -> bool:
        """Whether gradients came since the last step without a sample being seen.

        To be asked before ``take()``, of a step at which samples were due; never so if
        this taker rests, or was told to expect gradients of no sample.
        """
        seen = self._forward_seen or self._empty_seen or self._excused or self._groups
        return self.active and not seen and self._since_step.came()

    def excuse(self) -> None:
        """Expect gradients at this step that are no sample's."""
        self._excused = True

    def discard(self) -> None:
        """Forget the waiting rows and that a forward pass was seen."""
        if self._audit is not None:
            self._audit.stop()
        self._end_step()

    def _end_step(self) -> None:
        self._forward_seen = self._empty_seen = self._excused = False
        self._since_step.note()
        self._recycle()

    def _complete_groups(
        self, grads: Sequence[Tensor | None] | None
    ) -> Sequence[AnyGroup]:
        """The groups of this step; an error if they miss a part of the gradient."""
        if grads is None and self._since_backward.are_missing:
            self.discard()  # what they belonged to was thrown away
        groups, doubts = list(self._groups.values()), self._doubts
        unwritten, audited = self._entries(groups, grads)
        self._end_step()
        if doubts or unwritten or audited:
            return _checked(groups, doubts, unwritten, audited)
        return groups

    def _entries(
        self, groups: list[AnyGroup], grads: Sequence[Tensor | None] | None
    ) -> tuple[list[Entry], list[Entry]]:
        """Gradients to be compared: of parameters without rows, and of all if due."""
        audited = [] if self._audit is None else self._audit.end_step()
        if self._audit is None or self._excused:
            return [], []
        parameters, slots = self.layout.parameters, self.layout.slots
        if grads is not None:
            triples = zip(parameters, slots, grads, strict=True)
            return [], [entry(p, s, g, groups) for p, s, g in triples if g is not None]
        if not (groups or self._forward_seen):
            return [], audited
        num_doubted = self._doubts[-1][0] if self._doubts else 0
        written = set().union(*[group.written for group in groups[num_doubted:]])
        unwritten = [
            entry(p, slot, p.grad, [])
            for p, slot in zip(parameters, slots, strict=True)
            if slot.start not in written and p.grad is not None and p.numel() >= FEWEST
        ]
        return unwritten, audited

    def _running(self) -> list[AnyGroup]:
        """The groups of the backward pass that is running now."""
        task = current_graph_task()
        return [group for group in self._groups.values() if group.task == task]

    def _begin_group(self, task: int, batch: int) -> AnyGroup:
        if self.least is Reach.FILLS and not (self._groups and self._running()):
            if self._groups:
                self._drop_stale()
            when_backward_ends(self._since_backward.note)
        like, dtype = self.layout.parameters[0], self.layout.common_dtype
        made: AnyGroup
        if self._direction_rank is None:
            made = RowGroup(self._buffer(batch, dtype, like), batch, task)
        else:
            rank, spare = self._direction_rank, self._spare_rows
            made = FactorGroup(batch, task, dtype, like.device, rank, spare)
        self._groups[task, batch] = made
        return made

    def _drop_stale(self) -> None:
        """Forget waiting groups whose gradient was thrown away by ``zero_grad()``."""
        if self._since_backward.are_missing:
            self._recycle()
        elif self._since_backward.may_be_zeroed:
            # Or clipped, or unscaled: that is for the device to say, in take().
            norm = self._since_backward.largest_norm()
            self._doubts.append((len(self._groups), norm))
            self._since_backward.note()

    def _recycle(self) -> None:
        for group in self._groups.values():
            if isinstance(group, RowGroup):
                self._spare.append(group.buffer)
            else:
                self._spare_rows |= group.buffers()
        self._groups.clear()
        self._doubts = []

    def _buffer(self, batch: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        for i, spare in enumerate(self._spare):
            # A short last batch borrows the head of the full-size buffer.
            if len(spare) >= batch and (spare.dtype, spare.device) == (
                dtype,
                like.device,
            ):
                return self._spare.pop(i)
        self._spare.clear()
        shape = (batch, self.layout.dim)
        return torch.zeros(shape, dtype=dtype, device=like.device)


def _checked(
    groups: list[AnyGroup],
    doubts: list[tuple[int, Tensor]],
    unwritten: list[Entry],
    audited: list[Entry],
) -> list[AnyGroup]:
    """The groups that are not void; an error if they miss a part of the gradient.

    Args:
        groups: In the order of their backward passes.
        doubts: How many groups are void if this number on the device is 0.
        unwritten: Gradients of parameters that no group has rows of, void ones aside.
        audited: Gradients that a backward pass brought.
    """
    norms, *numbers = read(
        [norm for _, norm in doubts],
        [entry.products for entry in unwritten],
        [entry.products for entry in audited],
    )
    void = [num for (num, _), (norm,) in zip(doubts, norms, strict=True) if not norm]
    dropped = {group.task for group in groups[: max(void, default=0)]}
    groups = groups[max(void, default=0) :]
    written = set().union(*(group.written for group in groups))
    pairs = [
        pair
        for pair in zip(unwritten, numbers[0], strict=True)
        if pair[0].slot.start not in written
    ]
    pairs += [
        pair
        for pair in zip(audited, numbers[1], strict=True)
        if pair[0].task not in dropped
    ]
    check_complete([entry.finding(found) for entry, found in pairs])
    return groups


def by_samples(groups: Sequence[G], slots: Sequence[Slot]) -> list[G]:
    """Groups that hold the same samples added up, the others as they are.

    A second ``backward()`` through a forward pass is about the same samples, and so is
    one through later passes that go on from it.
    """
    if len(groups) == 1:
        return list(groups)
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
