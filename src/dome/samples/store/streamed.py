"""Rows that are used and dropped layer by layer, while backward() goes on.

    backward()   layer L: rows (B, D_L) ──► used ──► their memory is layer L−1's
                 layer L−1: ...

The rows of a layer are complete when autograd has added up the gradient of each of its
parameters that it comes by; it says so for every parameter by itself. Layers that a
backward pass leaves out have rows of zeros, which are made at the step.
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome.parameters import Block, Layout, Slot
from dome.samples.store.audit import FEWEST, Audit, Entry, check_complete, entry
from dome.samples.store.gradients import Gradients, Leaves, Reach, read
from dome.samples.store.group import RowGroup
from dome.samples.store.sink import Pass
from dome.torch_private import current_graph_task

NO_PASS = -1  # instead of the number of a backward pass
LINE = 64  # bytes: two addresses that differ by a multiple of it are aligned alike

# Takes the name of a layer and its rows (B, D of the layer), valid during the call.
Use = Callable[[str, Tensor], None]


class StreamedRows:
    """A taker of rows that gives them away at once, one layer at a time.

    Args:
        layout: The parameters, and which layer is whose.
        use: What is done with the rows of a layer.
        ignore_penalty: Do not ask whether rows account for all of the gradient.
    """

    def __init__(
        self, layout: Layout, use: Use, *, ignore_penalty: bool = False
    ) -> None:
        self.layout = layout
        self.active, self.keeps_products = True, False
        self.least = Reach.FILLS
        self._use = use
        self._leaves = Leaves(layout.parameters)
        self._since_step = Gradients(layout.parameters)
        self._audit = None if ignore_penalty else Audit(layout, self._running)
        self._blocks = {block.name: block for block in layout.blocks}
        self._members: dict[str, list[nn.Parameter]] = {n: [] for n in self._blocks}
        self._block_of: dict[int, Block] = {}
        for p, slot in zip(layout.parameters, layout.slots, strict=True):
            block = next(b for b in layout.blocks if b.start <= slot.start < b.stop)
            self._members[block.name].append(p)
            self._block_of[slot.start] = block
        self._handles: list[RemovableHandle] = []
        self._spare: list[Tensor] = []
        self._groups: dict[str, tuple[RowGroup, Tensor]] = {}
        self._forget()

    def _forget(self) -> None:
        """Begin a step."""
        self._forward_seen = self._empty_seen = self._excused = False
        self._spare += [flat for _, flat in self._groups.values()]
        self._groups = {}
        self._task, self._batch = NO_PASS, 0
        self._used: set[str] = set()
        self._written: set[int] = set()
        # Whose gradients a backward pass is still to bring, layer by layer.
        self._arriving, self._missing = NO_PASS, dict[str, set[int]]()

    def arm(self, active: bool) -> None:
        """Choose whether forward passes from now on are captured; a step is over."""
        self.active = active
        self._since_step.note()

    def begin(self, num_samples: int) -> None:
        """Note a forward pass: from now on gradients must have rows."""
        if num_samples:
            self._forward_seen = True
        else:
            self._empty_seen = True
        if self._audit is not None and not self._audit.steps_left:
            self._audit.begin()
        if not self._handles:
            self._handles = [
                p.register_post_accumulate_grad_hook(self._arrives)
                for p in self.layout.parameters
                if p.requires_grad
            ]

    def group(self, source: Pass, slot: Slot) -> RowGroup:
        """The rows of a parameter's layer, for the backward pass that is running."""
        task, block = current_graph_task(), self._block_of[slot.start]
        if self._task == NO_PASS:
            self._task, self._batch = task, source.batch
        if task != self._task:
            raise RuntimeError(once_a_step("another backward pass came before it"))
        if source.batch != self._batch or block.name in self._used:
            raise RuntimeError(
                f"layer {block.name!r} got samples of another number ({source.batch} "
                f"and {self._batch}), or got samples again after stream=True had used "
                "it: leave stream out, which takes several batches in one step"
            )
        if block.name not in self._groups:
            self._groups[block.name] = self._new_group(block)
        return self._groups[block.name][0]

    def take(self) -> None:
        """Use what is left of this step: layers that the backward pass left out."""
        if self._task != NO_PASS and all(p.grad is None for p in self._parameters):
            raise RuntimeError(once_a_step("its gradients were thrown away"))
        entries = self._entries()
        (numbers,) = read([entry.products for entry in entries])
        pairs = zip(entries, numbers, strict=True)
        check_complete([entry.finding(found) for entry, found in pairs])
        if self._task != NO_PASS:
            for block in self.layout.blocks:
                if block.name not in self._used:
                    self._finish(block)
        self.discard()

    @property
    def num_waiting(self) -> int:
        """How many backward passes wait for the step."""
        return int(self._task != NO_PASS)

    def came_without(self) -> bool:
        """Whether gradients came since the last step without a sample being seen."""
        seen = self._forward_seen or self._empty_seen
        return self.active and not seen and self._since_step.came()

    def excuse(self) -> None:
        """Expect gradients at this step that are no sample's."""
        self._excused = True

    def discard(self) -> None:
        """Forget this step; what was used of it cannot be taken back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._audit is not None:
            self._audit.stop()
        self._since_step.note()
        self._forget()

    @property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        return self.layout.parameters

    def _arrives(self, p: Tensor) -> None:
        """The gradient of a parameter is complete; maybe its layer is."""
        task = current_graph_task()
        block = self._block_of[self.layout.slot_of[id(p)].start]
        if task != self._arriving:
            self._arriving, self._missing = task, {}
        missing = self._missing.get(block.name)
        if missing is None:
            members, reach = self._members[block.name], self._leaves.reach
            missing = {id(q) for q in members if reach(q) is Reach.FILLS}
            self._missing[block.name] = missing
        missing.discard(id(p))
        if not missing and task == self._task and block.name in self._groups:
            self._finish(block)

    def _finish(self, block: Block) -> None:
        """Use the rows of a layer, and drop them."""
        if block.name not in self._groups:
            self._groups[block.name] = self._new_group(block)
        group, flat = self._groups.pop(block.name)
        members = self._members[block.name]
        group.finish([self.layout.slot_of[id(p)] for p in members])
        self._written |= group.written
        self._used.add(block.name)
        self._use(block.name, group.rows)
        self._spare.append(flat)

    def _running(self) -> list[RowGroup]:
        """The groups of the backward pass that is running now."""
        now = current_graph_task() == self._task
        return [group for group, _ in self._groups.values()] if now else []

    def _entries(self) -> list[Entry]:
        """Gradients to be compared: of parameters without rows, and of all if due."""
        audit, audited = self._audit, list[Entry]()
        if audit is not None and audit.is_listening:
            audited = audit.end_step()
        elif audit is not None:
            audit.steps_left = max(audit.steps_left - 1, 0)
        if audit is None or self._excused:
            return []
        if self._task == NO_PASS and not self._forward_seen:
            return audited
        waiting = (group.written for group, _ in self._groups.values())
        written = self._written.union(chain.from_iterable(waiting))
        return audited + [
            entry(p, slot, p.grad, [])
            for p, slot in zip(self._parameters, self.layout.slots, strict=True)
            if slot.start not in written and p.grad is not None and p.numel() >= FEWEST
        ]

    def _new_group(self, block: Block) -> tuple[RowGroup, Tensor]:
        """Room for the rows of a layer, and the memory it is in.

        Rows are as far apart, and begin where, they would in a matrix (B, D), up to
        multiples of a cache line: kernels may round in another order where they are
        aligned in another way, or where rows follow each other without a gap.
        """
        like, dim = self._parameters[0], self.layout.dim
        dtype = self.layout.common_dtype
        line = LINE // dtype.itemsize
        first, gap = block.start % line, min(1, dim - block.dim)
        apart = block.dim + gap
        apart += (dim - apart) % line
        flat = self._memory(first + self._batch * apart, dtype, like.device)
        rows = flat.as_strided((self._batch, block.dim), (apart, 1), first)
        members = (self.layout.slot_of[id(p)].start for p in self._members[block.name])
        places = {start: start - block.start for start in members}
        return RowGroup(rows, self._batch, self._task, places), flat

    def _memory(self, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Space for so many numbers: the smallest there is, or more than there is."""
        fitting = [
            flat
            for flat in self._spare
            if flat.numel() >= num and (flat.dtype, flat.device) == (dtype, device)
        ]
        # If none fits, the smallest of those that are free makes way for a new one.
        taken = min(fitting or self._spare, key=Tensor.numel, default=None)
        self._spare = [flat for flat in self._spare if flat is not taken]
        if fitting and taken is not None:
            return taken
        return torch.empty(num, dtype=dtype, device=device)


def once_a_step(what: str) -> str:
    """The sentence for a step that is not one backward pass."""
    return (
        "stream=True, and a communication hook, use samples during backward(), once "
        f"per step. A backward pass updated bases and no step followed: {what}. Call "
        "optimizer.step() after each backward(). To accumulate gradients or to skip "
        'steps, leave stream out, or give the hook\'s state samples="worker"'
    )
