"""Where a rule puts the per-sample gradient of one weight that it met.

A weight is a tracked parameter, whose rows are written straight into the buffer, or a
tensor derived from parameters alone (a view, a merged LoRA weight, a weight norm):
then the rows are pulled back to the parameters through that small graph.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dome.numerics.factors import Product
from dome.numerics.sides import Side
from dome.samples.store.wanted import Pass


class Sink:
    """Takes the per-sample gradients of one weight in one call of one operation.

    Args:
        source: The forward pass that the operation is part of.
        weight: The weight as the operation saw it.
        sources: The wanted parameters it was computed from; itself, if it is one.
    """

    def __init__(
        self, source: Pass, weight: Tensor, sources: tuple[nn.Parameter, ...]
    ) -> None:
        self._pass = source
        self._sources = sources
        # An edge, not the tensor: a later in-place operation would move the tensor on.
        self._edge = None if weight is sources[0] else get_gradient_edge(weight)
        self._dtype = weight.dtype

    def wanted(self) -> bool:
        """Whether the backward pass that is running now needs the weight's gradient."""
        return any(map(self._pass.wanted.computes, self._sources))

    def room(self, dtype: torch.dtype, zero: bool = False) -> Tensor | None:
        """Space (B, *weight) to write into, None if the rows must go through ``put``.

        Args:
            dtype: What would be written; a buffer of another type is not offered.
            zero: Clear the space first, to add to it; then it is offered for later
                contributions too.
        """
        if self._edge is not None:
            return None
        takers = self._pass.wanted.recording(self._sources[0])
        if len(takers) != 1:
            return None
        return takers[0].room(self._pass, self._sources[0], dtype, zero)

    def keep(self, left: Side, right: Side) -> bool:
        """Offer samples as a product, before rows are made; whether it is taken."""
        if self._edge is not None:
            return False
        takers = self._pass.wanted.recording(self._sources[0])
        if len(takers) != 1:
            return False
        return takers[0].keep(self._pass, self._sources[0], Product(left, right))

    def put(self, grads: Tensor) -> None:
        """Store per-sample gradients (B, *weight) that ``room`` had no space for."""
        if self._edge is None:
            self._give(self._sources[0], grads, grads.dtype)
            return
        # autograd.grad() alone fills no ``.grad``, and leaves no rows either.
        sources = [p for p in self._sources if self._pass.wanted.recording(p)]
        if sources:
            pulled = _pull_back(self._edge, sources, grads.to(self._dtype))
            for p, rows in zip(sources, pulled, strict=True):
                if rows is not None:
                    self._give(p, rows, grads.dtype)

    def _give(self, p: nn.Parameter, rows: Tensor, dtype: torch.dtype) -> None:
        for taker in self._pass.wanted.recording(p):
            taker.put(self._pass, p, rows, dtype)


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
