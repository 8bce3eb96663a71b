"""``attach``: the filter as one line in a training loop that stays as it is."""

from collections.abc import Iterable, Mapping
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dome.filter import GradientFilter
from dome.hooking import Newcomers, call_before_step, check_optimizer, held_by
from dome.options import Options
from dome.parameters import selected
from dome.torch_private import runs_step_hooks


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int | Mapping[str, int],
    *,
    parameters: Iterable[Tensor | str] | str | None = None,
    samples: str = "per_sample",
    stream: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[Options],
) -> GradientFilter:
    """Filter the gradients of every ``optimizer.step()`` from now on.

    Args:
        model: The model that is trained.
        optimizer: Any optimizer over the model's parameters, or some of them; the
            others are left alone. When ``step`` gets a closure (LBFGS, Lightning), the
            filter runs after each call of it.
        rank: Number of directions K to remove.
        parameters: Filter only those of the optimizer's parameters that are among
            these: tensors, names, or patterns of names such as "encoder.*".
        samples: As in ``GradientFilter``, and so are the other options.
        stream: As in ``GradientFilter``.
        scaler: As in ``GradientFilter``.
        **options: Those of ``dome.options.Options``.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    check_optimizer(model, optimizer)
    if not runs_step_hooks(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} wraps another optimizer and does not run "
            "torch's step hooks: use dome.integrations.accelerate.attach, or attach "
            "to the optimizer inside"
        )
    held = held_by(optimizer)
    ours, patterns = selected(model, parameters, among=held)
    ours = held if ours is None else ours
    grad_filter = GradientFilter(
        model,
        rank,
        parameters=ours,
        samples=samples,
        stream=stream,
        scaler=scaler,
        **options,
    )
    newcomers = Newcomers(model, held, patterns)
    call_before_step(optimizer, grad_filter, newcomers)
    return grad_filter
