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
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome.parameters import Layout, Slot
from dome.samples.store.gradients import Gradients
from dome.samples.store.wanted import Leaves, Reach
from dome.torch_private import current_graph_task, hook_first, when_backward_ends

_STATE = "held"

# On a GPU, whether to say something is asked at the first step and then every so many:
# the answer has to be waited for.
_EVERY = 100


class Masks:
    """Which of the D entries of ``.grad`` are held at zero.

    Args:
        layout: The parameters; hooks are put on them, until ``detach()``.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = Leaves()
        arrived = torch.zeros(layout.dim, dtype=torch.bool, device=layout.device)
        self._arrived = arrived
        # None where it is known on the host that nothing is.
        self._held: Tensor | None = None
        self._has_arrived = False
        self._task, self._num_running = -1, 0
        self._num_steps, self._has_told = 0, False
        self._handles = [
            hook_first(p, _listener(weakref.ref(self), p, self._part(slot)))
            for p, slot in zip(layout.parameters, layout.slots, strict=True)
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
        for p, slot in zip(self._layout.parameters, self._layout.slots, strict=True):
            if p.grad is None:
                self._part(slot).zero_()
        for start, grad in grads.items():
            found[start : start + grad.numel()] &= is_zero(grad).view(-1)
        sane = (norm > 0) & norm.isfinite()
        if found.device.type != "cpu":
            kept = False if before is None else before
            self._held = torch.where(sane, found, kept)
        elif sane:
            # As bytes: any() of booleans takes longer than all the rest.
            self._held = found.clone() if found.view(torch.uint8).amax() else None
        self._begin_step()
        return self._held

    def _begin_step(self) -> None:
        """Expect nothing but what backward passes bring from now on."""
        self._arrived.zero_()
        self._has_arrived, self._num_running = False, 0
        if self._held is None or self._has_told:
            return
        if self._held.device.type == "cpu" or self._num_steps % _EVERY == 0:
            self._tell(self._held)
        self._num_steps += 1

    def _part(self, slot: Slot) -> Tensor:
        """What arrived of one parameter, in its shape."""
        return self._arrived[slot.start : slot.stop].view(slot.shape)

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

    @torch.no_grad()
    def _note(self, p: nn.Parameter, here: Tensor, grad: Tensor) -> None:
        """What a backward pass brings for a parameter, before it is in ``.grad``."""
        before = p.grad
        # What the filter refuses by name at the step is no matter here.
        fits = grad.shape == here.shape and grad.device == here.device
        dense = not grad.is_sparse and (before is None or not before.is_sparse)
        if not (fits and dense and self._leaves.reach(p) is Reach.FILLS):
            return
        self._begin_pass()
        if before is None:
            here.copy_(grad)  # a quarter of the time of grad != 0
        else:
            # Gradients of two passes may cancel, which is no mask's doing.
            here &= is_zero(before)
            here |= (before + grad).bool()

    def _begin_pass(self) -> None:
        """Forget passes whose gradients were thrown away before this one began."""
        task, nested = current_graph_task(), self._num_running > 0
        if task == self._task:
            return
        self._task = task
        if self._has_arrived and not nested:
            grads = Gradients(self._layout.parameters)
            if grads.are_missing:
                self._arrived.zero_()
            else:
                self._arrived &= grads.largest_norm() != 0
        self._has_arrived = True
        self._num_running += 1
        when_backward_ends(self._end_pass)

    def _end_pass(self) -> None:
        self._num_running = max(self._num_running - 1, 0)

    def _tell(self, held: Tensor) -> None:
        """Say once what is held, and where the first of it is."""
        slots = self._layout.slots
        counts = [int(held[slot.start : slot.stop].sum()) for slot in slots]
        if not any(counts):
            return
        self._has_told = True
        first = next(slot.name for slot, num in zip(slots, counts, strict=True) if num)
        warnings.warn(
            f"{sum(counts)} entries of .grad, the first in {first!r}, are held at zero "
            f"although backward() brought gradients for them: by a mask on the "
            f"gradient. dome leaves them at zero, too.",
            RuntimeWarning,
            stacklevel=2,
        )


def is_zero(tensor: Tensor) -> Tensor:
    """Which numbers of a tensor are exactly zero: a quarter of the time of == 0."""
    return tensor.bool().logical_not_()


def _listener(
    masks: "weakref.ref[Masks]", p: nn.Parameter, here: Tensor
) -> Callable[[Tensor], None]:
    # A hook lives as long as its parameter, and must not keep a filter alive.
    def listen(grad: Tensor) -> None:
        owner = masks()
        if owner is not None:
            owner._note(p, here, grad)

    return listen


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
