"""Entries of ``.grad`` that a mask of the user's holds at zero, and that stay there.

Embeddings are frozen and weights pruned by ``p.register_hook(lambda g: g * mask)`` or
``p.grad *= mask``. g − U Uᵀ g is not zero where g is, and would move them. So an entry
is held if ``backward()`` brought a gradient for it since the last step and ``.grad`` is
exactly zero, and from then on for as long as ``.grad`` is zero at every step. Entries
that no sample touched are not held.

What backward brings is seen before any hook of the user's. It costs one pass over the D
numbers of the gradient, and one byte for each.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome.parameters import Layout
from dome.samples.store.gradients import Leaves, Reach
from dome.torch_private import (
    current_graph_task,
    hook_after_first,
    hook_first,
    never_compile,
    when_backward_ends,
)

_STATE = "held"

# On a GPU, whether to say something is asked at the first step and then every so many:
# the answer has to be waited for.
_EVERY = 100


class Masks:
    """Which of the D entries of ``.grad`` are held at zero.

    Args:
        layout: The parameters; hooks are put on them, until ``detach()``.
        shards: With ``fully_shard``, where what is held here of each parameter lies
            among all numbers that are held here.
    """

    def __init__(self, layout: Layout, shards: Sequence[slice] | None = None) -> None:
        self._layout = layout
        # FSDP2 fills .grad by itself, and no hook sees the gradient before.
        self._leaves = Leaves(layout.parameters) if shards is None else None
        columns = shards or [slice(slot.start, slot.stop) for slot in layout.slots]
        num, device = columns[-1].stop, layout.device
        self._arrived = torch.zeros(num, dtype=torch.bool, device=device)
        self._parts = [
            self._arrived[part].view(here(p).shape)
            for p, part in zip(layout.parameters, columns, strict=True)
        ]
        # None where it is known on the host that nothing is.
        self._held: Tensor | None = None
        self._has_arrived = False
        self._task, self._fills, self._num_running = -1, False, 0
        self._num_steps, self._has_told = 0, False
        never_compile("dome")
        hook, note = (
            (hook_first, _note) if shards is None else (hook_after_first, _note_sum)
        )
        self._handles = [
            # A hook lives as long as its parameter, and must not keep a filter alive.
            hook(p, partial(note, weakref.ref(self), p, part))
            for p, part in zip(layout.parameters, self._parts, strict=True)
        ]
        weakref.finalize(self, _remove, self._handles)

    def find(self, grads: Mapping[int, Tensor], norm: Tensor) -> Tensor | None:
        """The entries that are held at this step, (D,) booleans; None for none.

        Args:
            grads: What is in ``.grad``, by first column in the flat gradient.
            norm: Of all of it. If it is zero or not finite, nothing is learned.
        """
        found, before = self._arrived, self._held
        if before is not None:
            found |= before
        self._leave_out_missing()
        for start, grad in grads.items():
            found[start : start + grad.numel()] &= is_zero(grad).view(-1)
        sane = (norm > 0) & norm.isfinite()
        if found.device.type != "cpu":
            kept = False if before is None else before
            self._held = torch.where(sane, found, kept)
        elif sane:
            self._held = found.clone() if is_any(found) else None
        self._begin_step()
        return self._held

    def has_news(self) -> bool:
        """Whether a worker's own ``.grad`` has entries to hold that are news."""
        found = self._arrived
        self._leave_out_missing()
        pairs = zip(self._layout.parameters, self._parts, strict=True)
        there = [(p.grad, part) for p, part in pairs if p.grad is not None]
        for grad, part in there:
            part.logical_and_(is_zero(grad))
        if self._held is not None:
            found &= ~self._held
        if not is_any(found):
            return False
        norm = torch.stack([torch.linalg.vector_norm(grad) for grad, _ in there]).sum()
        found &= (norm > 0) & norm.isfinite()
        return is_any(found)

    def share(self, unite: Callable[[Tensor], None]) -> None:
        """Hold what is news to any worker; all call it if there is any.

        Args:
            unite: Replaces bytes (D,) by the largest of all workers, in place.
        """
        unite(self._arrived.view(torch.uint8))
        held = torch.zeros_like(self._arrived) if self._held is None else self._held
        self._held = held | self._arrived

    def settle(self, gradient: Tensor) -> None:
        """End a step of workers: go on holding what is zero in all of it, (D,)."""
        if self._held is not None:
            norm = torch.linalg.vector_norm(gradient)
            if (norm > 0) & norm.isfinite():
                self._held &= is_zero(gradient)
                self._held = self._held if is_any(self._held) else None
        self._begin_step()

    @property
    def held(self) -> Tensor | None:
        """The entries that workers hold, (D,) booleans; None for none."""
        return self._held

    def _leave_out_missing(self) -> None:
        """Hold nothing of parameters without a ``.grad``."""
        for p, part in zip(self._layout.parameters, self._parts, strict=True):
            if p.grad is None:
                part.zero_()

    def _begin_step(self) -> None:
        """Expect nothing but what backward passes bring from now on."""
        self._arrived.zero_()
        self._has_arrived, self._num_running = False, 0
        if self._held is None or self._has_told:
            return
        if self._held.device.type == "cpu" or self._num_steps % _EVERY == 0:
            self._tell(self._held)
        self._num_steps += 1

    def detach(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)

    def state_dict(self) -> dict[str, Tensor]:
        """The entries that are held, if any."""
        if self._held is None or not self._held.any():
            return {}
        return {_STATE: self._held.clone()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse entries of another number of parameters."""
        held = state.get(_STATE)
        if held is None:
            return
        if held.dtype != torch.bool or held.shape != self._arrived.shape:
            raise ValueError(
                f"{_STATE!r} in the state has shape {tuple(held.shape)} and type "
                f"{held.dtype}, not ({len(self._arrived)},) and torch.bool: the file "
                f"is damaged, or of another model"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the entries that are held back."""
        held = state.get(_STATE)
        self._held = None if held is None else held.to(self._arrived.device, copy=True)

    def _begin_pass(self, task: int, p: nn.Parameter) -> None:
        """Forget passes whose gradients were thrown away before this one began."""
        self._task = task
        # A pass fills ``.grad`` of all that it comes by, or of none: autograd.grad().
        self._fills = self._leaves is None or self._leaves.reach(p) is Reach.FILLS
        if not self._fills:
            return
        if self._has_arrived and not self._num_running:
            parameters = self._layout.parameters
            grads = [here(p.grad) for p in parameters if p.grad is not None]
            if grads:
                self._arrived &= torch.stack([g.any() for g in grads]).any()
            else:
                self._arrived.zero_()
        self._has_arrived = True
        self._num_running += 1
        when_backward_ends(self._end_pass)

    def _end_pass(self) -> None:
        self._num_running = max(self._num_running - 1, 0)

    def _tell(self, held: Tensor) -> None:
        """Say once what is held, and where the first of it is."""
        counts = [
            int(held[part.storage_offset() :][: part.numel()].sum())
            for part in self._parts
        ]
        if not any(counts):
            return
        self._has_told = True
        names = [slot.name for slot in self._layout.slots]
        first = next(name for name, num in zip(names, counts, strict=True) if num)
        warnings.warn(
            f"{sum(counts)} entries of .grad, the first in {first!r}, are held at zero "
            "although backward() computed gradients for them, as by a mask on the "
            "gradient. dome keeps them at zero too.",
            RuntimeWarning,
            stacklevel=2,
        )


def is_any(found: Tensor) -> bool:
    """Whether any of some booleans is true: a fiftieth of the time of ``any()``."""
    return found.numel() > 0 and bool(found.view(torch.uint8).amax())


def is_zero(tensor: Tensor) -> Tensor:
    """Which numbers of a tensor are exactly zero: a quarter of the time of == 0."""
    return tensor.bool().logical_not_()


@torch.no_grad()
def here(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, or its part of a DTensor."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@torch.no_grad()
def _note(
    masks: "weakref.ref[Masks]", p: nn.Parameter, part: Tensor, grad: Tensor
) -> None:
    """What a backward pass brings for a parameter, before it is in ``.grad``."""
    owner, before = masks(), p.grad
    # What the filter refuses by name at the step is no matter here.
    fits = grad.shape == part.shape and grad.device == part.device
    dense = not grad.is_sparse and (before is None or not before.is_sparse)
    if owner is None or not (fits and dense and p.requires_grad):
        return
    task = current_graph_task()
    if task != owner._task:
        owner._begin_pass(task, p)
    if not owner._fills:
        return
    if before is None:
        part.copy_(grad)  # a quarter of the time of grad != 0
    else:
        # Gradients of two passes may cancel, which is no mask's doing.
        part &= is_zero(before)
        part |= (before + grad).bool()


@torch.no_grad()
def _note_sum(
    masks: "weakref.ref[Masks]", p: nn.Parameter, part: Tensor, _: Tensor
) -> None:
    """What FSDP2 has left in ``.grad``, before a mask changes it."""
    owner, task = masks(), current_graph_task()
    if owner is None:
        return
    if task != owner._task:
        owner._begin_pass(task, p)
    if p.grad is not None:
        part |= here(p.grad).bool()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
