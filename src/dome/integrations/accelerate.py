"""The filter for a model and an optimizer that ``Accelerator.prepare`` returned.

Accelerate wraps the optimizer, and with several processes the model. The filter goes on
the optimizer inside, which Accelerate steps once the accumulated gradient is complete.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import dome.distributed
from dome.attachment import attach as attach_here
from dome.filter import GradientFilter


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int | Mapping[str, int],
    **options: Any,  # noqa: ANN401 (the filters name and check them)
) -> GradientFilter:
    """Filter the gradients of every step of a prepared optimizer from now on.

    Call it after ``accelerator.prepare``. To have the filter in the checkpoints of
    ``accelerator.save_state``, call ``accelerator.register_for_checkpointing`` with it.

    Args:
        model: The prepared model. One in ``DistributedDataParallel`` gets the filter of
            ``dome.distributed.attach``.
        optimizer: The prepared optimizer.
        rank: Number of directions K to remove.
        **options: Those of ``GradientFilter``, or of ``dome.distributed.attach``.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    inner, scaler = unwrapped(optimizer)
    if scaler is not None:
        options = {"scaler": scaler} | options
    if isinstance(model, DistributedDataParallel):
        return dome.distributed.attach(model, inner, rank, **options)
    return attach_here(model, inner, rank, **options)


def unwrapped(optimizer: Optimizer) -> tuple[Optimizer, Any]:
    """The optimizer inside Accelerate's wrapper, and its GradScaler or None."""
    scaler = None
    # By attribute, not by class: this file does not need Accelerate to be imported.
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        scaler = scaler or getattr(optimizer, "scaler", None)
        optimizer = inner
    return optimizer, scaler
