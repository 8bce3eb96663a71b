"""Questions to autograd's engine about the backward pass that is running now."""

from enum import IntEnum

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def current_backward() -> int:
    """A number no other backward pass of this process has; -1 outside of one."""
    return torch._C._current_graph_task_id()


class Reach(IntEnum):
    """What the running backward pass does about the gradient of a parameter."""

    NOTHING = 0
    COMPUTES = 1  # for autograd.grad(), which leaves .grad alone
    FILLS = 2


def reach(p: nn.Parameter) -> Reach:
    """What the running backward pass does about the gradient of a parameter."""
    try:
        runs = torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    except RuntimeError:
        # Torch refuses to answer for a leaf that autograd.grad() was asked for.
        return Reach.COMPUTES
    return Reach.FILLS if runs else Reach.NOTHING


def has_gradient(p: nn.Parameter) -> bool:
    """Whether ``.grad`` holds anything but zeros."""
    return p.grad is not None and bool(p.grad.any())
