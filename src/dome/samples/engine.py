"""Questions to autograd's engine about the backward pass that is running now."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


def current_backward() -> int:
    """A number no other backward pass of this process has; -1 outside of one."""
    return torch._C._current_graph_task_id()


def reaches(p: nn.Parameter, functional: bool = False) -> bool:
    """Whether the running backward pass is to compute the gradient of a parameter.

    Args:
        p: The parameter, a leaf.
        functional: Count ``autograd.grad()`` too, which leaves ``.grad`` alone.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    except RuntimeError:
        # Torch refuses to answer for a leaf that autograd.grad() was asked for.
        return functional


def has_gradient(p: nn.Parameter) -> bool:
    """Whether ``.grad`` holds anything but zeros."""
    return p.grad is not None and bool(p.grad.any())
