"""What becomes of ``.grad`` between steps, asked of the device as rarely as possible.

Whether somebody wrote to a gradient, tensors tell by a counter on the host. Whether it
holds anything but zeros, only the device knows: the answer is left there, as a number
that is read together with others when samples are taken.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dome.torch_private import norms_of, version_of, versions_of

# A gradient and how often it was written to.
Mark = tuple["weakref.ref[Tensor]", int] | None


class Gradients:
    """The gradients of some parameters, noted as they are now.

    Args:
        parameters: Whose ``.grad`` it is about.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._marks: list[Mark] = []
        self.note()

    def note(self) -> None:
        """Remember the gradients as they are now."""
        grads = [p.grad for p in self._parameters]
        versions = versions_of(grads)
        self._marks = [
            None if grad is None else (weakref.ref(grad), version)
            for grad, version in zip(grads, versions, strict=True)
        ]

    @property
    def are_missing(self) -> bool:
        """Whether no parameter has a gradient, as after ``zero_grad()``."""
        return all(p.grad is None for p in self._parameters)

    @property
    def are_as_noted(self) -> bool:
        """Whether nobody wrote to any of them since ``note()``."""
        return all(map(_is_as_noted, self._parameters, self._marks))

    @property
    def may_be_zeroed(self) -> bool:
        """Whether every one was written to since ``note()``, perhaps by zeros."""
        pairs = zip(self._parameters, self._marks, strict=True)
        return not any(
            p.grad is not None and _is_as_noted(p, mark) for p, mark in pairs
        )

    def largest_norm(self) -> Tensor:
        """A number that is 0 if all are zero, shape (); it stays on the device."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return torch.stack([norm.float() for norm in norms_of(grads)]).amax()


def _is_as_noted(p: nn.Parameter, mark: Mark) -> bool:
    if mark is None or p.grad is None:
        return mark is None and p.grad is None
    return mark[0]() is p.grad and mark[1] == version_of(p.grad)


def came_without_samples(gradients: Gradients) -> bool:
    """Whether gradients were filled since ``note()``, and not with zeros.

    Waits for the device: to be asked where samples were due and none are there.
    """
    if gradients.are_missing or gradients.are_as_noted:
        return False
    # A worker without samples may have a gradient of zeros.
    return float(gradients.largest_norm()) != 0
