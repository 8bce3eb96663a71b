"""How a rule writes an autograd function: the types torch leaves open."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dome.samples.tracing.nested import Value

# What autograd passes to the forward and backward of a function; torch types it so.
Context = Any

_Backward = TypeVar("_Backward", bound=Callable[..., Value])

# A second differentiation would bypass the rows: torch's own error is the right one.
first_order = cast(Callable[[_Backward], _Backward], once_differentiable)


def apply(function: type[Function], *args: Value) -> Value:
    """Run an autograd function."""
    return function.apply(*args)
