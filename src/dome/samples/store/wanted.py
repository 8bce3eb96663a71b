"""Who takes the samples of which parameter, for one forward pass of a model.

One capture feeds all takers of a model: an operation runs once, its per-sample
gradients are made once, and each taker gets those of its own parameters. In backward()
autograd is asked which gradients the running pass computes, and which it fills in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dome.parameters import Layout
from dome.torch_private import current_graph_task, in_compiled_autograd, will_run
from dome.trackers.factors import Product


class Reach(IntEnum):
    """What the running backward pass does about the gradient of a parameter."""

    NOTHING = 0
    COMPUTES = 1  # for autograd.grad(), which leaves .grad alone
    FILLS = 2


class Leaves:
    """The nodes of the graph where the gradients of parameters end.

    Held from pass to pass, because looking one up costs as much as a small product.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[torch.device, torch.dtype, Node]] = {}

    def reach(self, p: nn.Parameter) -> Reach:
        """What the running backward pass does about the gradient of a parameter."""
        if not p.requires_grad:
            return Reach.NOTHING  # frozen since the forward pass
        if in_compiled_autograd():
            raise RuntimeError(
                "this backward() runs under compiled autograd, which does not tell "
                "which gradients it fills: switch compiled autograd off; models may be "
                "compiled all the same"
            )
        found = self._nodes.get(id(p))
        # Moving a parameter to another device or type gives it a new node.
        if found is None or found[:2] != (p.device, p.dtype):
            try:
                found = (p.device, p.dtype, get_gradient_edge(p).node)
            except AttributeError:
                # Inside torch.func, which has graphs of its own and fills no .grad.
                return Reach.COMPUTES
            self._nodes[id(p)] = found
        try:
            runs = will_run(found[2])
        except RuntimeError:
            # Torch refuses to answer for a leaf that autograd.grad() was asked for.
            return Reach.COMPUTES
        return Reach.FILLS if runs else Reach.NOTHING


class Taker(Protocol):
    """Collects the samples of some of a model's parameters, in one of two forms.

    As rows: ``room`` and ``put`` get gradients (B, *parameter), which the taker keeps
    side by side in one matrix (B, D). This is what ``Rows`` does, and all that the
    trackers of today need.

    As factors: a rule has δ (B, T, out) and a (B, T, in) in its hands just before it
    multiplies them. It offers them to ``keep`` first, see ``dome.trackers.factors``; a
    taker that keeps these two never sees rows. If several take samples of a parameter,
    rows are made for all.

    Attributes:
        layout: The parameters.
        active: Whether samples are wanted now.
        least: What a backward pass must do about a parameter to leave samples.
        keeps_products: Whether it is worth offering factors.
    """

    layout: Layout
    active: bool
    least: Reach
    keeps_products: bool

    def begin(self, num_samples: int) -> None:
        """A forward pass of so many samples starts."""

    def room(
        self, source: "Pass", p: nn.Parameter, dtype: torch.dtype, zero: bool
    ) -> Tensor | None:
        """Space (B, *parameter) for a rule to write into, None if there is none."""

    def keep(self, source: "Pass", p: nn.Parameter, product: Product) -> bool:
        """Whether samples are taken as a product; if not, they come as rows."""

    def put(
        self, source: "Pass", p: nn.Parameter, grads: Tensor, dtype: torch.dtype
    ) -> None:
        """Add per-sample gradients (B, *parameter), which were computed in a type."""


class Wanted:
    """The parameters whose samples are wanted, by whom, and what they are called.

    Made anew when takers come, go or rest; a graph keeps feeding those it was built
    for.

    Args:
        takers: At least one. A parameter may have several.
    """

    def __init__(self, takers: Sequence[Taker]) -> None:
        self.takers = tuple(takers)
        self._takers_of: dict[int, tuple[Taker, ...]] = {}
        self._names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for taker in takers:
            layout = taker.layout
            for p, slot in zip(layout.parameters, layout.slots, strict=True):
                parameters[id(p)] = p
                self._names[id(p)] = slot.name
                self._takers_of[id(p)] = (*self._takers_of.get(id(p), ()), taker)
        self.parameters = tuple(parameters.values())
        self.keeps_products = any(taker.keeps_products for taker in takers)
        self._leaves = Leaves()
        # What was asked about the backward pass of this number already.
        self._task = -1
        self._answers: dict[int, tuple[bool, tuple[Taker, ...]]] = {}

    def __contains__(self, p: nn.Parameter) -> bool:
        return id(p) in self._takers_of

    def name(self, p: nn.Parameter) -> str:
        """The parameter as the user calls it."""
        return self._names[id(p)]

    def asked_of(self, p: nn.Parameter) -> tuple[bool, tuple[Taker, ...]]:
        """Whether the running backward pass computes the gradient of a parameter.

        And who takes samples of it.
        """
        task = current_graph_task()
        if task != self._task:
            self._task, self._answers = task, {}
        found = self._answers.get(id(p))
        if found is None:
            reach = self._leaves.reach(p)
            takers = [taker for taker in self._takers_of[id(p)] if reach >= taker.least]
            found = self._answers[id(p)] = (reach > Reach.NOTHING, tuple(takers))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass.

    Attributes:
        batch: B, the number of its samples.
        wanted: Who takes them.
    """

    batch: int
    wanted: Wanted
