"""Questions to autograd about the backward pass that is running now."""

from enum import IntEnum

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from dome.torch_private import current_graph_task, will_run


def current_backward() -> int:
    """A number no other backward pass of this process has; -1 outside of one."""
    return current_graph_task()


class Reach(IntEnum):
    """What the running backward pass does about the gradient of a parameter."""

    NOTHING = 0
    COMPUTES = 1  # for autograd.grad(), which leaves .grad alone
    FILLS = 2


def reach(node: Node) -> Reach:
    """What the running backward pass does about the gradient that ends in a node."""
    try:
        runs = will_run(node)
    except RuntimeError:
        # Torch refuses to answer for a leaf that autograd.grad() was asked for.
        return Reach.COMPUTES
    return Reach.FILLS if runs else Reach.NOTHING


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
        found = self._nodes.get(id(p))
        # Moving a parameter to another device or type gives it a new node.
        if found is None or found[:2] != (p.device, p.dtype):
            try:
                found = (p.device, p.dtype, get_gradient_edge(p).node)
            except AttributeError:
                # Inside torch.func, which has graphs of its own and fills no .grad.
                return Reach.COMPUTES
            self._nodes[id(p)] = found
        return reach(found[2])
