"""From a rule to those who take the samples of a weight that it met.

    rule ──► Site ──► Sink of the weight ──► group of taker 1   rows, or products
                 └──► Sink of the bias   └─► group of taker 2

A weight is a tracked parameter, or a tensor derived from parameters alone (a view, a
merged LoRA weight, a weight norm): then rows are pulled back to the parameters through
that small graph. One capture feeds all takers of a model: an operation runs once, its
per-sample gradients are made once, and each taker gets those of its own parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dome.parameters import Layout, Slot
from dome.samples.store.gradients import Leaves, Reach
from dome.samples.tracing.origins import Place
from dome.trackers.factors import Product, Side


class Group(Protocol):
    """The samples of one backward pass and one batch size, parameter by parameter."""

    def room(self, slot: Slot, dtype: torch.dtype, zero: bool) -> Tensor | None:
        """Space (B, *parameter) for a rule to write into, None if there is none."""

    def keep(self, slot: Slot, product: Product) -> bool:
        """Whether samples are taken as a product; if not, they come as rows."""

    def add(self, slot: Slot, grads: Tensor, dtype: torch.dtype) -> None:
        """Add rows (B, *parameter), which were computed in a type."""


class Taker(Protocol):
    """Collects the samples of some of a model's parameters, in one of two forms.

    As rows: gradients (B, *parameter), which lie side by side in one matrix (B, D).

    As products: a rule has δ (B, T, out) and a (B, T, in) in its hands just before it
    multiplies them. It offers them first, see ``dome.trackers.factors``; a taker that
    keeps these two never sees rows. If several take samples of a parameter, rows are
    made for all.

    Attributes:
        layout: The parameters.
        active: Whether samples are wanted now.
        least: What a backward pass must do about a parameter to leave samples.
        keeps_products: Whether it is worth offering products.
    """

    layout: Layout
    active: bool
    least: Reach
    keeps_products: bool

    def begin(self, num_samples: int) -> None:
        """A forward pass of so many samples starts."""

    def group(self, source: "Pass", slot: Slot) -> Group:
        """Where a parameter's samples of the running backward pass go."""


# An enumeration is walked by a generator, which one graph of torch.compile refuses.
_REACHES = tuple(Reach)

# Who takes the samples of a parameter, and which of their parameters it is.
Takers = tuple[tuple[Taker, Slot], ...]


class Wanted:
    """The parameters whose samples are wanted, by whom, and what they are called.

    Made anew when takers come, go or rest; a graph keeps feeding those it was built
    for.

    Args:
        takers: At least one. A parameter may have several.
        allow_mixing: Let parameters meet samples that were mixed.
        strict: The error to raise for every mix of samples, if none may be.
    """

    def __init__(
        self,
        takers: Sequence[Taker],
        *,
        allow_mixing: bool,
        strict: type[RuntimeError] | None,
    ) -> None:
        self.takers = tuple(takers)
        self.allow_mixing, self.strict = allow_mixing, strict
        self.keeps_products = any(taker.keeps_products for taker in takers)
        self._pairs: dict[int, list[tuple[Taker, Slot]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for taker in takers:
            layout = taker.layout
            for p, slot in zip(layout.parameters, layout.slots, strict=True):
                parameters[id(p)] = p
                self._pairs.setdefault(id(p), []).append((taker, slot))
        self.parameters = tuple(parameters.values())
        self.leaves = Leaves(self.parameters)
        # By the number of a parameter and what a backward pass does about it.
        self.takers_of: dict[tuple[int, Reach], Takers] = {
            (number, reach): tuple((t, slot) for t, slot in pairs if reach >= t.least)
            for number, pairs in self._pairs.items()
            for reach in _REACHES
        }

    def __contains__(self, p: nn.Parameter) -> bool:
        return id(p) in self._pairs

    def name(self, p: nn.Parameter) -> str:
        """The parameter as the user calls it."""
        return self._pairs[id(p)][-1][1].name


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass.

    Attributes:
        batch: B, the number of its samples.
        wanted: Who takes them.
    """

    batch: int
    wanted: Wanted


@dataclass(slots=True, eq=False)
class Sink:
    """Takes the per-sample gradients of one weight in one call of one operation.

    In each backward pass ``wanted`` is asked first: it also finds who takes them.

    Attributes:
        source: The forward pass that the operation is part of.
        sources: The wanted parameters the weight was computed from; itself, if it is
            one.
        dtype: The weight's.
        edge: Where the graph of a derived weight starts; None of a parameter. Not the
            tensor: a later in-place operation would move it on.
    """

    source: Pass
    sources: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    edge: GradientEdge | None
    # Of the running backward pass: whether anybody may take samples as products, if
    # they are offered, and who takes samples of each of the sources.
    keeps_products: bool = False
    _takers: list[Takers] = field(default_factory=list)

    def wanted(self) -> bool:
        """Whether the backward pass that is running now needs the weight's gradient."""
        wanted, most, self._takers = self.source.wanted, Reach.NOTHING, []
        for p in self.sources:
            reach = wanted.leaves.reach(p)
            self._takers.append(wanted.takers_of[id(p), reach])
            most = max(most, reach)
        self.keeps_products = wanted.keeps_products and self.edge is None
        return most > Reach.NOTHING

    def room(self, dtype: torch.dtype, zero: bool = False) -> Tensor | None:
        """Space (B, *weight) to write into, None if the rows must go through ``put``.

        Args:
            dtype: What would be written; a buffer of another type is not offered.
            zero: Clear the space first, to add to it; then it is offered for later
                contributions too.
        """
        if self.edge is not None or len(self._takers[0]) != 1:
            return None
        ((taker, slot),) = self._takers[0]
        return taker.group(self.source, slot).room(slot, dtype, zero)

    def keep(self, left: Side, right: Side) -> bool:
        """Offer samples as a product, before rows are made; whether it is taken."""
        if self.edge is not None or len(self._takers[0]) != 1:
            return False
        ((taker, slot),) = self._takers[0]
        return taker.group(self.source, slot).keep(slot, Product(left, right))

    def put(self, grads: Tensor) -> None:
        """Store per-sample gradients (B, *weight) that ``room`` had no space for."""
        found = [(grads, self._takers[0])]
        if self.edge is not None:
            found = self._pulled_back(self.edge, grads)
        for rows, takers in found:
            for taker, slot in takers:
                taker.group(self.source, slot).add(slot, rows, grads.dtype)

    def _pulled_back(
        self, edge: GradientEdge, grads: Tensor
    ) -> list[tuple[Tensor, Takers]]:
        """Rows (B, *source) of each source that they are taken of, and by whom."""
        # autograd.grad() alone fills no ``.grad``, and leaves no rows either.
        pairs = zip(self.sources, self._takers, strict=True)
        taken = [(p, takers) for p, takers in pairs if takers]
        if not taken:
            return []
        pulled = _pull_back(edge, [p for p, _ in taken], grads.to(self.dtype))
        return [
            (rows, takers)
            for rows, (_, takers) in zip(pulled, taken, strict=True)
            if rows is not None
        ]


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
