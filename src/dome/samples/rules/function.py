"""How a rule writes an autograd function: the types torch leaves open."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dome.samples.tracing.nested import Value
from dome.torch_private import applied, follows_several, raising_if_differentiated

# What autograd passes to the forward and backward of a function; torch types it so.
Context = Any

# Runs an autograd function.
apply = applied

_Backward = TypeVar("_Backward", bound=Callable[..., Value])

_TWICE = (
    "dome captures first derivatives only, and the gradient of a captured forward pass "
    "was differentiated again (a gradient penalty, a physics-informed loss, MAML): "
    "compute that part, its forward pass included, inside `with grad_filter.paused():`"
    ', or use samples="microbatch"'
)


def first_order(backward: _Backward) -> _Backward:
    """A backward whose results raise by name where they are differentiated again.

    As torch's ``once_differentiable``, but also where no gradient arrives that could
    be differentiated: the weights of a linear map are in its slope all the same.
    """

    @wraps(backward)
    def run(ctx: Context, *grads: Value) -> Value:
        # Off, unless the user asked for a graph of the gradients (create_graph).
        again = torch.is_grad_enabled()
        try:
            if again:
                with torch.no_grad():
                    results = backward(ctx, *grads)
            else:
                results = backward(ctx, *grads)
        except RuntimeError as error:
            if any(map(follows_several, grads)):
                raise RuntimeError(
                    "dome captures one gradient at a time, and a captured forward pass "
                    "was differentiated in several directions at once "
                    "(is_grads_batched, vectorize=True): compute that part, its "
                    "forward pass included, inside `with grad_filter.paused():`"
                ) from error
            raise
        if not again:
            return results
        known = (*ctx.saved_tensors, *grads)
        sources = [t for t in known if isinstance(t, Tensor) and t.requires_grad]
        return raising_if_differentiated(_TWICE, results, sources)

    return cast(_Backward, run)
