"""How an optimizer calls a filter before its step, until it is detached.

A basis has a row for each parameter it was made for. A parameter that comes after a
filter was attached (added, unfrozen or replaced) has none and would go by unfiltered,
so it is refused by name.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Never, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dome.parameters import check_model, kind_of, matches


class Hooked:
    """Something that an optimizer calls before its step, until ``detach()``."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def step(self) -> None:
        """Filter ``.grad`` in place."""
        raise NotImplementedError

    @property
    def is_attached(self) -> bool:
        """Whether an optimizer calls this filter."""
        return bool(self._handles)

    def __deepcopy__(self, _: object) -> Never:
        raise TypeError(
            f"a copy of a {type(self).__name__} would filter nothing: its hooks are on "
            f"the model and the optimizer that it was made for. Copy the model, attach "
            f"a new filter, and give it this one's state: "
            f"new.load_state_dict(old.state_dict())"
        )

    def hook_into(self, handle: RemovableHandle) -> None:
        """Remember a hook that calls this filter, for ``detach`` to remove."""
        self._handles.append(handle)

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer. Can be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


class Newcomers:
    """Looks for parameters that are trained now and were not when this was made.

    What was trained then and left out on purpose may stay so.

    Args:
        model: Whose parameters they are; of others, none is filtered anyway.
        trained: What is trained: the parameters of an optimizer, or of the model.
        patterns: Names of those to be filtered; any, if not given.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[Tensor],
        patterns: Sequence[str] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._patterns = patterns
        # The parameters themselves: a number is given again when its tensor is gone,
        # and torch cannot exchange the data of a tensor that has weak references.
        self._known = {id(p): p for p in trained if p.requires_grad}

    def check(self, trained: Iterable[Tensor] | None = None) -> None:
        """Raise ``RuntimeError`` for a parameter that would train unfiltered.

        Args:
            trained: What is trained now; the model's parameters, if not given.
        """
        if trained is None:
            model = self._model()
            trained = () if model is None else model.parameters()
        for p in trained:
            if p.requires_grad and id(p) not in self._known:
                self._refuse(p)
                self._known[id(p)] = p

    def _refuse(self, p: Tensor) -> None:
        model = self._model()
        for name, own in () if model is None else model.named_parameters():
            wanted = self._patterns is None or matches(name, self._patterns)
            if own is p and wanted:
                raise RuntimeError(
                    f"parameter {name!r} is trained, but was added, unfrozen or "
                    "replaced after the filter was attached, and would stay "
                    "unfiltered: call detach() and attach again (the basis starts "
                    "anew), or pass parameters=... to dome.attach to filter only those"
                )


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"]]


_filter_of: "weakref.WeakKeyDictionary[Optimizer, Hooked]" = weakref.WeakKeyDictionary()


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
