"""Where a rule puts the per-sample gradient of one weight that it met.

A weight is a tracked parameter, whose rows are written straight into the buffer, or a
tensor derived from parameters alone (a view, a merged LoRA weight, a weight norm):
then the rows are pulled back to the parameters through that small graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dome.samples.store.wanted import Pass, Taker
from dome.samples.tracing.origins import Place
from dome.trackers.factors import Product, Side


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

    @property
    def keeps_products(self) -> bool:
        """Whether anybody may take samples as products, if they are offered."""
        return self._edge is None and self._pass.wanted.keeps_products

    def wanted(self) -> bool:
        """Whether the backward pass that is running now needs the weight's gradient."""
        if self._edge is None:
            return self._pass.wanted.asked_of(self._sources[0])[0]
        return any(self._pass.wanted.asked_of(p)[0] for p in self._sources)

    def room(self, dtype: torch.dtype, zero: bool = False) -> Tensor | None:
        """Space (B, *weight) to write into, None if the rows must go through ``put``.

        Args:
            dtype: What would be written; a buffer of another type is not offered.
            zero: Clear the space first, to add to it; then it is offered for later
                contributions too.
        """
        taker = self._only_taker()
        if taker is None:
            return None
        return taker.room(self._pass, self._sources[0], dtype, zero)

    def keep(self, left: Side, right: Side) -> bool:
        """Offer samples as a product, before rows are made; whether it is taken."""
        taker = self._only_taker()
        if taker is None:
            return False
        return taker.keep(self._pass, self._sources[0], Product(left, right))

    def put(self, grads: Tensor) -> None:
        """Store per-sample gradients (B, *weight) that ``room`` had no space for."""
        wanted, p = self._pass.wanted, self._sources[0]
        if self._edge is None:
            for taker in wanted.asked_of(p)[1]:
                taker.put(self._pass, p, grads, grads.dtype)
            return
        # autograd.grad() alone fills no ``.grad``, and leaves no rows either.
        sources = [p for p in self._sources if wanted.asked_of(p)[1]]
        if sources:
            pulled = _pull_back(self._edge, sources, grads.to(self._dtype))
            for p, rows in zip(sources, pulled, strict=True):
                if rows is not None:
                    for taker in wanted.asked_of(p)[1]:
                        taker.put(self._pass, p, rows, grads.dtype)

    def _only_taker(self) -> Taker | None:
        """Who takes samples of a parameter, if it is one and takes them as they are."""
        if self._edge is not None:
            return None
        takers = self._pass.wanted.asked_of(self._sources[0])[1]
        return takers[0] if len(takers) == 1 else None


@dataclass(slots=True, eq=False)  # never changed: a frozen one takes twice as long
class Site:
    """One place of a forward pass where samples meet a weight and, maybe, a bias.

    What the backward of a rule needs to know besides tensors.

    Attributes:
        axis: Where the operation's input and result hold the samples.
        weight: Takes the weight's per-sample gradients; None if it is not tracked.
        bias: The same for the bias.
        transposed: The weight is (in, out), not (out, in).
    """

    axis: Place
    weight: Sink | None
    bias: Sink | None
    transposed: bool = False

    def wants_weight(self) -> bool:
        """Whether this backward pass asks for the weight's gradient."""
        return self.weight is None or self.weight.wanted()

    def wants_bias(self) -> bool:
        """Whether this backward pass asks for the bias's gradient."""
        return self.bias is None or self.bias.wanted()

    def weight_total(self, grads: Tensor) -> Tensor:
        """Store per-sample weight gradients (B, *weight), return their sum."""
        if self.weight is not None:
            self.weight.put(grads)
        return grads.sum(0)

    def bias_total(self, grads: Tensor) -> Tensor:
        """Store per-sample bias gradients (B, *bias), return their sum."""
        if self.bias is not None:
            self.bias.put(grads)
        return grads.sum(0)


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
