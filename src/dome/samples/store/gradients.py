"""What is known of ``.grad`` on the host, and what only the device can tell.

    backward()   which gradients does it compute, which does it fill in?   ``Leaves``
    later        has anybody written to them, or thrown them away?         ``Gradients``
    the step     answers of the device, read in one wait                   ``read``

A tensor counts on the host how often it was written to. Whether it holds anything but
zeros only the device knows: such an answer stays there until samples are taken.
"""

import weakref
from collections.abc import Sequence
from enum import IntEnum
from functools import reduce

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dome.torch_private import (
    current_graph_task,
    in_compiled_autograd,
    norms_of,
    versions_of,
    will_run,
)


class Reach(IntEnum):
    """What the running backward pass does about the gradient of a parameter."""

    NOTHING = 0
    COMPUTES = 1  # for autograd.grad(), which leaves .grad alone
    FILLS = 2


class Leaves:
    """Where the gradients of some parameters end in the graph of a backward pass.

    Autograd is asked once in each backward pass, about all of them.

    Args:
        parameters: Those that may be asked about.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        # Looking up a node costs as much as a small product: kept from pass to pass.
        self._nodes: dict[int, tuple[torch.device, torch.dtype, Node]] = {}
        self._task = -1
        self._reach: dict[int, Reach] = {}

    def reach(self, p: nn.Parameter) -> Reach:
        """What the running backward pass does about the gradient of a parameter."""
        task = current_graph_task()
        if task != self._task:
            if in_compiled_autograd():
                raise RuntimeError(
                    "this backward() runs under compiled autograd, which hides the "
                    "gradients that it fills: turn compiled autograd off; compiled "
                    "models work without it"
                )
            self._ask_about_all()
            self._task = task
        return self._reach[id(p)]

    def _ask_about_all(self) -> None:
        for p in self._parameters:
            if not p.requires_grad:
                self._reach[id(p)] = Reach.NOTHING  # frozen since the forward pass
                continue
            try:
                # Moving a parameter to another device or type gives it a new node.
                found = self._nodes.get(id(p))
                if found is None or found[:2] != (p.device, p.dtype):
                    found = (p.device, p.dtype, get_gradient_edge(p).node)
                    self._nodes[id(p)] = found
                reach = Reach.FILLS if will_run(found[2]) else Reach.NOTHING
            except (AttributeError, RuntimeError):
                # Inside torch.func, which has graphs of its own; or a leaf that
                # autograd.grad() was asked for, of which torch refuses to tell.
                reach = Reach.COMPUTES
            self._reach[id(p)] = reach


class Gradients:
    """The gradients of some parameters, noted as they are now.

    Args:
        parameters: Whose ``.grad`` it is about.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        # Of each: the gradient, and how often it was written to.
        self._grads: list[weakref.ref[Tensor] | None] = []
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """Remember the gradients as they are now."""
        grads = [p.grad for p in self._parameters]
        self._versions = versions_of(grads)
        self._grads = [None if grad is None else weakref.ref(grad) for grad in grads]

    @property
    def are_missing(self) -> bool:
        """Whether no parameter has a gradient, as after ``zero_grad()``."""
        return all(p.grad is None for p in self._parameters)

    @property
    def are_as_noted(self) -> bool:
        """Whether nobody wrote to any of them since ``note()``."""
        return all(is_same for _, is_same in self._compared())

    @property
    def may_be_zeroed(self) -> bool:
        """Whether every one was written to since ``note()``, perhaps by zeros."""
        return not any(
            grad is not None and is_same for grad, is_same in self._compared()
        )

    def came(self) -> bool:
        """Whether gradients were filled since ``note()``, and not with zeros.

        Waits for the device: to be asked where samples were due and none are there.
        """
        if self.are_missing or self.are_as_noted:
            return False
        # A worker without samples may have a gradient of zeros.
        return float(self.largest_norm()) != 0

    def largest_norm(self) -> Tensor:
        """A number that is 0 if all are zero, shape (); it stays on the device."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return torch.stack([norm.float() for norm in norms_of(grads)]).amax()

    def _compared(self) -> list[tuple[Tensor | None, bool]]:
        """Each gradient, and whether it is as it was noted."""
        grads = [p.grad for p in self._parameters]
        before = [None if ref is None else ref() for ref in self._grads]
        versions = zip(versions_of(grads), self._versions, strict=True)
        return [
            (grad, grad is old and now == then)
            for grad, old, (now, then) in zip(grads, before, versions, strict=True)
        ]


def read(*answers: Sequence[Tensor]) -> list[list[list[float]]]:
    """Lists of small tensors as lists of lists of numbers, for one wait in all."""
    flat = [t.reshape(-1) for some in answers for t in some]
    if not flat:
        return [[] for _ in answers]
    kind = reduce(torch.promote_types, (t.dtype for t in flat))
    numbers = iter(torch.cat([t.to(kind) for t in flat]).tolist())
    return [
        [[next(numbers) for _ in range(t.numel())] for t in some] for some in answers
    ]


class Questions:
    """Errors that depend on the device, raised at once where that costs no wait."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, RuntimeError]] = []

    def raise_if(self, doubt: Tensor | None, error: RuntimeError) -> None:
        """Raise an error if a doubt (0-dimensional) is true, now or in ``answer``."""
        if doubt is None:
            return
        if doubt.device.type != "cpu":
            self._open.append((doubt, error))
        elif doubt:
            raise error

    def answer(self) -> None:
        """Raise the first open error whose doubt is true."""
        if not self._open:
            return
        waiting, self._open = self._open, []
        (answers,) = read([doubt for doubt, _ in waiting])
        for (answer,), (_, error) in zip(answers, waiting, strict=True):
            if answer:
                raise error
