"""Arithmetic that is the same wherever it is called from."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from dome.torch_private import no_autocast

P = ParamSpec("P")
R = TypeVar("R")


def own_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without a graph, and in the precision of its own tensors.

    A step or backward pass may be called under autocast, where products of float32
    numbers keep 8 bits.
    """

    @wraps(function)
    def undisturbed(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), no_autocast():
            return function(*args, **kwargs)

    return undisturbed
