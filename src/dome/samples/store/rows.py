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

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.store.audit import Audit, Entry, entry
from dome.samples.store.factors import FactorGroup, batch_of
from dome.samples.store.gradients import Gradients, came_without_samples
from dome.samples.store.group import AnyGroup, Group, by_samples
from dome.samples.store.reading import read
from dome.samples.store.verdict import FEWEST, check_complete
from dome.samples.store.wanted import Pass, Reach
from dome.torch_private import current_graph_task, when_backward_ends
from dome.trackers.factors import FactorBatch, Product


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
        self._drop_stale()
        # No samples, no rows: the last of uneven batches.
        if num_samples:
            self._forward_seen = True
        else:
            self._empty_seen = True
        if self._audit is not None and self.least is Reach.FILLS:
            self._audit.begin()

    def room(
        self, source: Pass, p: nn.Parameter, dtype: torch.dtype, zero: bool
    ) -> Tensor | None:
        """Space (B, *parameter) for a rule to write into: see ``Group``."""
        return self._group(source).room(self.layout.slot_of[id(p)], dtype, zero)

    def keep(self, source: Pass, p: nn.Parameter, product: Product) -> bool:
        """Whether samples of the running backward pass are taken as a product."""
        return self._group(source).keep(self.layout.slot_of[id(p)], product)

    def put(
        self, source: Pass, p: nn.Parameter, grads: Tensor, dtype: torch.dtype
    ) -> None:
        """Add rows (B, *parameter) of the running backward pass."""
        self._group(source).add(self.layout.slot_of[id(p)], grads, dtype)

    def take(self, grads: Sequence[Tensor | None] | None = None) -> Tensor | None:
        """All waiting rows (B, D), unwritten parameters as zeros; None without any.

        Waits for the device at most once.

        Args:
            grads: The gradients that the rows must account for; ``.grad`` by default.
        """
        complete = self._complete_groups(grads)
        groups = [group for group in complete if isinstance(group, Group)]
        groups = by_samples(groups, self.layout.slots)
        for group in groups:
            group.finish(self.layout.slots)
        if len(groups) == 1:
            return groups[0].rows
        return torch.cat([group.rows for group in groups]) if groups else None

    def take_factors(self) -> FactorBatch | None:
        """All waiting samples, parameter by parameter; None without any."""
        complete = self._complete_groups(None)
        groups = [group for group in complete if isinstance(group, FactorGroup)]
        groups = by_samples(groups, self.layout.slots)
        return batch_of(groups, self.layout.slots) if groups else None

    def came_without(self) -> bool:
        """Whether gradients came since the last step without a sample being seen.

        To be asked before ``take()``, of a step at which samples were due; never so if
        this taker rests, or was told to expect gradients of no sample.
        """
        seen = self._forward_seen or self._empty_seen or self._excused or self._groups
        return self.active and not seen and came_without_samples(self._since_step)

    def excuse(self) -> None:
        """Expect gradients at this step that are no sample's."""
        self._excused = True

    def discard(self) -> None:
        """Forget the waiting rows and that a forward pass was seen."""
        self._forward_seen = self._empty_seen = self._excused = False
        if self._audit is not None:
            self._audit.stop()
        self._since_step.note()
        self._recycle()

    def _complete_groups(self, grads: Sequence[Tensor | None] | None) -> list[AnyGroup]:
        """The groups of this step; an error if they miss a part of the gradient."""
        if grads is None and self._since_backward.are_missing:
            self.discard()  # what they belonged to was thrown away
        groups, doubts = list(self._groups.values()), self._doubts
        unwritten, audited = self._entries(grads)
        self.discard()
        if not (doubts or unwritten or audited):
            return groups
        norms, *numbers = read(
            [norm for _, norm in doubts],
            [entry.products for entry in unwritten],
            [entry.products for entry in audited],
        )
        void = [
            num for (num, _), (norm,) in zip(doubts, norms, strict=True) if not norm
        ]
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

    def _entries(
        self, grads: Sequence[Tensor | None] | None
    ) -> tuple[list[Entry], list[Entry]]:
        """Gradients to be compared: of parameters without rows, and of all if due."""
        audited = [] if self._audit is None else self._audit.end_step()
        if self._audit is None or self._excused:
            return [], []
        parameters, groups = self.layout.parameters, list(self._groups.values())
        if grads is not None:
            triples = zip(parameters, self.layout.slots, grads, strict=True)
            return [], [entry(p, s, g, groups) for p, s, g in triples if g is not None]
        if not (groups or self._forward_seen):
            return [], audited
        sure = groups[max((num for num, _ in self._doubts), default=0) :]
        written = set().union(*(group.written for group in sure))
        unwritten = [
            entry(p, slot, p.grad, [])
            for p, slot in zip(parameters, self.layout.slots, strict=True)
            if slot.start not in written and p.grad is not None and p.numel() >= FEWEST
        ]
        return unwritten, audited

    def _running(self) -> list[AnyGroup]:
        """The groups of the backward pass that is running now."""
        task = current_graph_task()
        return [group for group in self._groups.values() if group.task == task]

    def _group(self, source: Pass) -> AnyGroup:
        """The group of the backward pass that is running now and this batch size."""
        task, batch = current_graph_task(), source.batch
        found = self._groups.get((task, batch))
        if found is None:
            if not self._running() and self.least is Reach.FILLS:
                self._drop_stale()
                when_backward_ends(self._since_backward.note)
            found = self._new_group(batch, task)
            self._groups[task, batch] = found
        found.passes.add(source)
        return found

    def _drop_stale(self) -> None:
        """Forget waiting groups whose gradient was thrown away by ``zero_grad()``."""
        if not self._groups:
            return
        if self._since_backward.are_missing:
            self._recycle()
        elif self._since_backward.may_be_zeroed:
            # Or clipped, or unscaled: that is for the device to say, in take().
            norm = self._since_backward.largest_norm()
            self._doubts.append((len(self._groups), norm))
            self._since_backward.note()

    def _recycle(self) -> None:
        for group in self._groups.values():
            if isinstance(group, Group):
                self._spare.append(group.buffer)
            else:
                self._spare_rows |= group.buffers()
        self._groups.clear()
        self._doubts = []

    def _new_group(self, batch: int, task: int) -> AnyGroup:
        like, dtype = self.layout.parameters[0], self.layout.common_dtype
        if self._direction_rank is None:
            return Group(self._buffer(batch, dtype, like), batch, task)
        rank, spare = self._direction_rank, self._spare_rows
        return FactorGroup(batch, task, dtype, like.device, rank, spare)

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
