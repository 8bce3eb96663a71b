"""The captured rows: one (B, D) buffer a backward pass, kept from step to step.

All that one ``backward()`` contributes for batches of one size lands in one group;
groups wait, one below the other, until ``take()`` hands them over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dome.numerics.pages import large_zeros
from dome.parameters import Layout, Slot
from dome.samples.store.backward import Reach, current_backward, has_gradient
from dome.samples.store.wanted import Pass


class Group:
    """The rows of one backward pass, filled one parameter at a time."""

    def __init__(self, buffer: Tensor, num_rows: int) -> None:
        self.buffer = buffer
        self.rows = buffer[:num_rows]
        self.written: set[int] = set()

    def view(self, slot: Slot) -> Tensor:
        """The columns of a parameter, shape (B, *parameter)."""
        columns = self.rows.narrow(1, slot.start, slot.stop - slot.start)
        if len(slot.shape) == 1:
            return columns
        return columns.view(len(columns), *slot.shape)

    def add(self, slot: Slot, grads: Tensor) -> None:
        """Write a first contribution (B, *parameter), add a later one."""
        if slot.start in self.written:
            self.view(slot).add_(grads)
        else:
            self.view(slot).copy_(grads)
            self.written.add(slot.start)


class Rows:
    """A taker of rows: groups that wait to be taken, and the buffers they lie in.

    Args:
        layout: The parameters, and which columns are whose.
        functional: Rows are wanted of autograd.grad(), which leaves .grad alone.
    """

    def __init__(self, layout: Layout, *, functional: bool = False) -> None:
        self.layout = layout
        self.active = True
        self._least = Reach.COMPUTES if functional else Reach.FILLS
        self._forward_seen = False
        self._groups: dict[tuple[int, int], Group] = {}
        self._spare: list[Tensor] = []

    @property
    def num_waiting(self) -> int:
        """How many backward passes wait; their rows may be scaled each in its way."""
        return len(self._groups)

    def begin(self, num_samples: int) -> None:
        """Note a forward pass: from now on gradients must have rows."""
        self._drop_stale()
        # No samples, no rows: the last of uneven batches.
        self._forward_seen |= num_samples > 0

    def records(self, reach: Reach) -> bool:
        """Whether a backward pass that does this about a parameter leaves rows."""
        return reach >= self._least

    def room(
        self, source: Pass, p: nn.Parameter, dtype: torch.dtype, zero: bool
    ) -> Tensor | None:
        """The columns of a parameter (B, *parameter), to be written by the caller.

        None if they hold a contribution already, or numbers of another type. With
        ``zero`` they are cleared, and offered for later contributions too.
        """
        group, slot = self._group(source), self.layout.slot_of[id(p)]
        fresh = slot.start not in group.written
        if group.rows.dtype != dtype or not (fresh or zero):
            return None
        group.written.add(slot.start)
        view = group.view(slot)
        return view.zero_() if zero and fresh else view

    def put(self, source: Pass, p: nn.Parameter, grads: Tensor) -> None:
        """Add rows (B, *parameter) of the running backward pass."""
        self._group(source).add(self.layout.slot_of[id(p)], grads)

    def take(self, grads: Sequence[Tensor | None] | None = None) -> Tensor | None:
        """All waiting rows (B, D), unwritten parameters as zeros; None without any.

        Args:
            grads: The gradients that the rows must account for; ``.grad`` by default.
        """
        forward_seen, self._forward_seen = self._forward_seen, False
        if forward_seen or self._groups:
            self._check_complete(grads or [p.grad for p in self.layout.parameters])
        groups = list(self._groups.values())
        for group in groups:
            for slot in self.layout.slots:
                if slot.start not in group.written:
                    group.view(slot).zero_()
        self._recycle()
        if not groups:
            return None
        if len(groups) == 1:
            return groups[0].rows
        return torch.cat([group.rows for group in groups])

    def discard(self) -> None:
        """Forget the waiting rows and that a forward pass was seen."""
        self._forward_seen = False
        self._recycle()

    def _group(self, source: Pass) -> Group:
        """The group of the backward pass that is running now."""
        task, batch = current_backward(), source.batch
        found = self._groups.get((task, batch))
        if found is None:
            if all(task != known for known, _ in self._groups):
                self._drop_stale()
            found = self._groups[task, batch] = Group(self._buffer(batch), batch)
        return found

    def _drop_stale(self) -> None:
        """Forget waiting groups whose gradient was thrown away by ``zero_grad()``."""
        if self._groups and not any(has_gradient(p) for p in self.layout.parameters):
            self._recycle()

    def _recycle(self) -> None:
        self._spare += [group.buffer for group in self._groups.values()]
        self._groups.clear()

    def _buffer(self, batch: int) -> Tensor:
        like = self.layout.parameters[0]
        dtype = like.dtype
        for p in self.layout.parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        for i, spare in enumerate(self._spare):
            # A short last batch borrows the head of the full-size buffer.
            if len(spare) >= batch and (spare.dtype, spare.device) == (
                dtype,
                like.device,
            ):
                return self._spare.pop(i)
        self._spare.clear()
        return large_zeros((batch, self.layout.dim), dtype, like.device)

    def _check_complete(self, grads: Sequence[Tensor | None]) -> None:
        written = set().union(*(group.written for group in self._groups.values()))
        for grad, slot in zip(grads, self.layout.slots, strict=True):
            if slot.start not in written and grad is not None and grad.any():
                raise RuntimeError(
                    f"parameter {slot.name!r} has a gradient that no captured sample "
                    "accounts for: it was used outside model(...), under activation "
                    "checkpointing or inside a torch.autograd.Function, or .grad was "
                    "set by hand. Call the model itself, switch checkpointing off, or "
                    'use samples="microbatch"'
                )
