"""The hooks on the model: every call of it is looked at before and after."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dome.privacy.guards.batches import BatchGuard, Forward
from dome.privacy.guards.parameters import ParameterGuard
from dome.privacy.refuse import check_products


class Watch:
    """Checks parameters before a call of the model, and notes what the call was given.

    Args:
        model: Hooks are registered on it, and nothing else.
        device: Where it computes.
        parameters: Are checked before every call.
        batches: Notes calls that may take part in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        parameters: ParameterGuard,
        batches: BatchGuard,
    ) -> None:
        self._device, self._parameters, self._batches = device, parameters, batches
        self._depth, self._active = 0, True
        self._call: Forward | None = None
        # First of all: what is refused is not captured.
        before = {"with_kwargs": True, "prepend": True}
        self._handles = (
            model.register_forward_pre_hook(self._before, **before),
            model.register_forward_hook(self._after, always_call=True),
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model be called unseen."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # A model that calls itself is one call.
        self._depth += 1
        if self._depth > 1 or not self._active:
            return
        self._parameters.check()
        if torch.is_grad_enabled() and self._batches.is_waiting:
            check_products(self._device)
            self._call = self._batches.saw(args, kwargs)

    def _after(self, _: nn.Module, __: object, output: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._call is not None:
            call, self._call = self._call, None
            self._batches.follow(call, output)


def _inert() -> Watch:
    watch = object.__new__(Watch)
    watch._depth, watch._active, watch._call = 0, False, None
    return watch
