"""Where a rule puts the per-sample gradient of one weight that it met.

A weight is a tracked parameter, whose rows are written straight into the buffer, or a
tensor derived from parameters alone (a view, a merged LoRA weight, a weight norm):
then the rows are pulled back to the parameters through that small graph.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dome.samples.rows import Rows
from dome.samples.tracing.nested import Value

# What autograd passes to the forward and backward of a function; torch types it so.
Context = Any

_Backward = TypeVar("_Backward", bound=Callable[..., Value])

# A second differentiation would bypass the rows: torch's own error is the right one.
first_order = cast(Callable[[_Backward], _Backward], once_differentiable)


def apply(function: type[Function], *args: Value) -> Value:
    """Run an autograd function."""
    return function.apply(*args)


class Sink:
    """Takes the per-sample gradients of one weight in one call of one operation.

    Args:
        rows: Where the rows go.
        weight: The weight as the operation saw it.
        sources: The tracked parameters it was computed from; itself, if it is one.
        batch: B.
    """

    def __init__(
        self, rows: Rows, weight: Tensor, sources: tuple[nn.Parameter, ...], batch: int
    ) -> None:
        self._rows = rows
        self._sources = sources
        self._batch = batch
        # An edge, not the tensor: a later in-place operation would move the tensor on.
        self._edge = None if weight is sources[0] else get_gradient_edge(weight)
        self._dtype = weight.dtype

    def wanted(self) -> bool:
        """Whether the backward pass that is running now needs the weight's gradient."""
        return any(map(self._rows.computes, self._sources))

    def room(self, dtype: torch.dtype, zero: bool = False) -> Tensor | None:
        """Space (B, *weight) to write into, None if the rows must go through ``put``.

        Args:
            dtype: What would be written; a buffer of another type is not offered.
            zero: Clear the space first, to add to it; then it is offered for later
                contributions too.
        """
        source = self._sources[0]
        if self._edge is not None or not self._rows.records(source):
            return None
        group = self._rows.group(self._batch)
        slot = self._rows.layout.slot_of[id(source)]
        fresh = slot.start not in group.written
        if group.rows.dtype != dtype or not (fresh or zero):
            return None
        group.written.add(slot.start)
        view = group.view(slot)
        return view.zero_() if zero and fresh else view

    def put(self, grads: Tensor) -> None:
        """Store per-sample gradients (B, *weight) that ``room`` had no space for."""
        # autograd.grad() alone fills no ``.grad``, and leaves no rows either.
        sources = [p for p in self._sources if self._rows.records(p)]
        if not sources:
            return
        group, slot_of = self._rows.group(self._batch), self._rows.layout.slot_of
        if self._edge is None:
            group.add(slot_of[id(sources[0])], grads)
            return
        pulled = _pull_back(self._edge, sources, grads.to(self._dtype))
        for p, rows in zip(sources, pulled, strict=True):
            if rows is not None:
                group.add(slot_of[id(p)], rows)


def _pull_back(
    weight: GradientEdge, sources: list[nn.Parameter], grads: Tensor
) -> list[Tensor | None]:
    """Rows (B, *source) of each source from rows (B, *weight) of a derived weight."""

    def pull(grad: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            (weight,),
            sources,
            (grad,),
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )

    try:
        return list(pull(grads, True))
    except RuntimeError:
        # A backward that vmap has no rule for (a Function of the user's, say).
        columns = zip(*(pull(grad, False) for grad in grads), strict=True)
        return [_stacked(column) for column in columns]


def _stacked(column: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [grad for grad in column if grad is not None]
    return torch.stack(present) if len(present) == len(column) else None
