"""``attach``: the filter as one line in a training loop that stays as it is."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dome.filter import GradientFilter
from dome.hooking import Hooked
from dome.newcomers import Newcomers, held_by
from dome.options import Options
from dome.parameters import check_model, kind_of, selected
from dome.torch_private import runs_step_hooks

_filter_of: "weakref.WeakKeyDictionary[Optimizer, Hooked]" = weakref.WeakKeyDictionary()


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
            f"{type(optimizer).__name__} is a wrapper that runs no hooks of torch: use "
            f"dome.integrations.accelerate.attach, or attach to the optimizer inside"
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


def check_optimizer(model: object, optimizer: Optimizer) -> None:
    """Refuse what is no model and optimizer, or has a filter already."""
    if hasattr(model, "param_groups") and hasattr(optimizer, "forward"):
        raise ValueError(
            f"model and optimizer are swapped: got {kind_of(model)} in the place of "
            f"the model and {kind_of(optimizer)} in that of the optimizer. Call "
            f"attach(model, optimizer, rank)"
        )
    check_model(model)
    # By name, which says it without DeepSpeed: of stages 1 to 3, and their kinds.
    if "ZeROOptimizer" in [kind.__name__ for kind in type(optimizer).__mro__]:
        raise ValueError(
            f"{type(optimizer).__name__} is DeepSpeed's ZeRO, which reduces and cuts "
            f"gradients during backward(): use DistributedDataParallel, or fully_shard "
            f"in the place of ZeRO, with dome.distributed.attach"
        )
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer, got {kind_of(optimizer)}"
        )
    previous = _filter_of.get(optimizer)
    if previous is not None and previous.is_attached:
        raise RuntimeError(
            "this optimizer already has a filter, a second one would filter twice: "
            "call detach() on the first"
        )


def call_before_step(
    optimizer: Optimizer, grad_filter: Hooked, newcomers: Newcomers | None = None
) -> None:
    """Let an optimizer call a filter before every step, or after every closure."""
    hook = _before_step(grad_filter, newcomers)
    grad_filter.hook_into(optimizer.register_step_pre_hook(hook))
    _filter_of[optimizer] = grad_filter


def _before_step(
    grad_filter: Hooked, newcomers: Newcomers | None
) -> Callable[..., Any]:
    def hook(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        if newcomers is not None:
            newcomers.check(held_by(optimizer))
        # args[0] is the optimizer itself: torch hooks the unbound method.
        position = len(args) > 1
        closure = args[1] if position else kwargs.get("closure")
        if closure is None:
            grad_filter.step()
            return None

        def filtered_closure() -> object:
            loss = closure()
            grad_filter.step()
            return loss

        if position:
            return (args[0], filtered_closure, *args[2:]), kwargs
        return args, kwargs | {"closure": filtered_closure}

    return hook
