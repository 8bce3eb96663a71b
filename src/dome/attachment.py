"""``attach``: the filter as one line in a training loop that stays as it is."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dome.filter import GradientFilter
from dome.hooking import Hooked
from dome.torch_private import runs_step_hooks

_filter_of: "weakref.WeakKeyDictionary[Optimizer, Hooked]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int | Mapping[str, int],
    **options: Any,  # noqa: ANN401 (GradientFilter names and checks them)
) -> GradientFilter:
    """Filter the gradients of every ``optimizer.step()`` from now on.

    Args:
        model: The model that is trained.
        optimizer: Any optimizer over the model's parameters, or some of them; the
            others are left alone. When ``step`` gets a closure (LBFGS, Lightning), the
            filter runs after each call of it.
        rank: Number of directions K to remove.
        **options: Those of ``GradientFilter``; ``parameters`` chooses among the
            optimizer's.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    check_no_filter(optimizer)
    if not runs_step_hooks(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is a wrapper that runs no hooks of torch: use "
            f"dome.integrations.accelerate.attach, or attach to the optimizer inside"
        )
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = options.pop("parameters", None)
    if wanted is not None:
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        names = [p for p in wanted if isinstance(p, str)]
        tensors = {id(p) for p in wanted if not isinstance(p, str)}
        ours = [p for p in ours if id(p) in tensors] if tensors else ours
        ours = [*ours, *names]
    grad_filter = GradientFilter(model, rank, parameters=ours, **options)
    call_before_step(optimizer, grad_filter)
    return grad_filter


def check_no_filter(optimizer: Optimizer) -> None:
    """Refuse an optimizer that calls a filter already."""
    previous = _filter_of.get(optimizer)
    if previous is not None and previous.is_attached:
        raise RuntimeError(
            "this optimizer already has a filter, a second one would filter twice: "
            "call detach() on the first"
        )


def call_before_step(optimizer: Optimizer, grad_filter: Hooked) -> None:
    """Let an optimizer call a filter before every step, or after every closure."""
    grad_filter.hook_into(optimizer.register_step_pre_hook(_before_step(grad_filter)))
    _filter_of[optimizer] = grad_filter


def _before_step(grad_filter: Hooked) -> Callable[..., Any]:
    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
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
