"""A model of the zoo and a batch for it, as it is shipped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Whatever other people's models take and return.
Value = Any
Inputs = dict[str, Any]

BATCH = 3


@dataclass(frozen=True)
class Case:
    """A model as it is shipped, and one batch for it.

    Attributes:
        model: Built from a small random configuration.
        inputs: What it is called with, by name.
        split: The inputs of sample b alone; as ``dome.verify`` does if not given.
        batch: How many samples.
        samples_in: The inputs that hold samples, where that can be declared.
        declared: Whether it is.
        frozen: Whether its batch norms are in evaluation mode.
    """

    model: nn.Module
    inputs: Inputs
    split: Callable[[Inputs, int], Inputs] | None = None
    batch: int = BATCH
    samples_in: tuple[str, ...] = ()
    declared: bool = False
    frozen: bool = False

    @property
    def names(self) -> tuple[str, ...] | None:
        """What a filter is told of its inputs."""
        return self.samples_in if self.declared else None

    def typed(self, inputs: Inputs, dtype: torch.dtype) -> Inputs:
        """Inputs with their real numbers in a type."""
        return {k: _as(v, dtype) for k, v in inputs.items()}

    def put(
        self, dtype: torch.dtype, *, training: bool = True
    ) -> tuple[nn.Module, Inputs]:
        """The model and its inputs in a type and a mode."""
        model = self.model.to(dtype).train(training)
        for module in model.modules() if self.frozen else ():
            if "BatchNorm" in type(module).__name__:
                module.eval()
        return model, self.typed(self.inputs, dtype)


def _as(value: Value, dtype: torch.dtype) -> Value:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    # A batch of graphs as one object.
    return value.apply(lambda t: _as(t, dtype)) if hasattr(value, "apply") else value
