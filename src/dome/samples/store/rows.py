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

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dome.parameters import Layout, Slot
from dome.samples.store.audit import FEWEST, Audit, Entry, check_complete, entry
from dome.samples.store.factors import FactorGroup, batch_of
from dome.samples.store.gradients import Gradients, Reach, read
from dome.samples.store.group import RowGroup, words_used
from dome.samples.store.sink import Pass
from dome.torch_private import current_graph_task, when_backward_ends
from dome.trackers.factors import FactorBatch
from dome.trackers.parts import Part, PartialRows

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
        tables: Parameters that are large embeddings. Of these the words of a batch
            are kept, unless they are used in another way too.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        functional: bool = False,
        ignore_penalty: bool = False,
        direction_rank: int | None = None,
        tables: Iterable[Tensor] = (),
    ) -> None:
        self.layout = layout
        self._tables = {id(p) for p in tables} & layout.slot_of.keys()
        self._compact: dict[int, Tensor] = {}
        self._arrange()
        self._direction_rank = direction_rank
        self.keeps_products = direction_rank is not None
        self.active = True
        self.least = Reach.COMPUTES if functional else Reach.FILLS
        self._forward_seen = self._empty_seen = False
        self._groups: dict[tuple[int, int], AnyGroup] = {}
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
        if audit is not None and not audit.steps_left and self.least is Reach.FILLS:
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
        found = self.take_parts(grads)
        return (
            found if found is None or isinstance(found, Tensor) else found.written_out()
        )

    def take_parts(
        self, grads: Sequence[Tensor | None] | None = None
    ) -> Tensor | PartialRows | None:
        """The same, without the words of large embeddings that no sample has.

        Waits once more for each of these.
        """
        found = cast("Sequence[RowGroup]", self._complete_groups(grads))
        groups = by_samples(found, self.layout.slots)
        if not groups:
            return None
        for group in groups:
            group.finish(self.layout.slots)
        rows = torch.cat([g.rows for g in groups]) if groups[1:] else groups[0].rows
        if not self._tables:
            return rows
        return PartialRows(tuple(self._parts(groups, rows)))

    def _arrange(self) -> None:
        """Give parameters their places in a buffer, without those of large embeddings.

        And tell which columns of the flat gradient lie side by side there.
        """
        self._spare: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._width = 0
        for p, slot in zip(self.layout.parameters, self.layout.slots, strict=True):
            if id(p) not in self._tables:
                self._places[slot.start] = self._width
                self._width += slot.stop - slot.start

    def _parts(self, groups: Sequence[RowGroup], rows: Tensor) -> Iterator[Part]:
        """What groups have, in order; their buffers' rows lie one below the other."""
        start = place = 0  # of the columns that come next
        for p, slot in zip(self.layout.parameters, self.layout.slots, strict=True):
            if id(p) in self._tables:
                if start < slot.start:
                    num = slot.start - start
                    yield Part(rows[:, place : place + num], slice(start, slot.start))
                    place += num
                yield self._table(groups, p, slot)
                start = slot.stop
        if start < self.layout.dim:
            yield Part(rows[:, place:], slice(start, self.layout.dim))

    def _table(self, groups: Sequence[RowGroup], p: Tensor, slot: Slot) -> Part:
        """The words of a large embedding that samples have."""
        columns = slice(slot.start, slot.stop)
        if any(slot.start in group.whole for group in groups):
            # Not an embedding alone: its rows have a place from now on.
            whole = torch.cat([group.view(slot).flatten(1) for group in groups])
            self._tables.discard(id(p))
            self._arrange()
            return Part(whole, columns)
        uses, counts = [g.uses(slot) for g in groups], [g.num_rows for g in groups]
        like, spare = groups[0].rows, self._compact.get(slot.start)

        def room(num: int) -> Tensor:
            kept = spare
            if kept is None or kept.numel() < num or kept.dtype != like.dtype:
                kept = self._compact[slot.start] = like.new_empty(num)
            return kept[:num].zero_()

        return words_used(uses, counts, columns, slot.shape, room)

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
        self._since_step.note()
        self._end_step()

    def _end_step(self) -> None:
        self._forward_seen = self._empty_seen = self._excused = False
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
            self._since_step.note()  # in case that this step goes no further
            return _checked(groups, doubts, unwritten, audited)
        return groups

    def _entries(
        self, groups: list[AnyGroup], grads: Sequence[Tensor | None] | None
    ) -> tuple[list[Entry], list[Entry]]:
        """Gradients to be compared: of parameters without rows, and of all if due."""
        audit, audited = self._audit, list[Entry]()
        if audit is not None and audit.is_listening:
            audited = audit.end_step()
        elif audit is not None:
            audit.steps_left = max(audit.steps_left - 1, 0)
        if audit is None or self._excused:
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
            made = RowGroup(self._buffer(batch, dtype, like), batch, task, self._places)
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
        shape = (batch, self._width)
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
