"""Any other operation: vmap over the samples, each with its own copy of the parameter.

Slower than a rule, because every sample gets a call of its own in torch.func's eyes,
but right for whatever vmap understands; autograd does the backward.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from dome.samples.axis import Axis
from dome.samples.rules.broadcast import shared_part, spread
from dome.samples.trace import Batched, Call, Trace


def fallback(trace: Trace, call: Call, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Run an operation without a rule once for each sample, vectorised."""
    values, spec = tree_flatten((args, kwargs))
    axes = [_axis(trace, call, value) for value in values]
    first = next(axis for axis in axes if axis is not None)
    size = next(
        v.shape[a.dim] for v, a in zip(values, axes, strict=True) if a is not None
    )
    for i, value in enumerate(values):
        shared = _shared(trace, value, first, size)
        if shared is not None:
            values[i], axes[i] = shared, first
    pairs = zip(values, axes, strict=True)
    lifted = [_lifted(trace, value, axis) for value, axis in pairs]
    moving = [i for i, (_, place) in enumerate(lifted) if place is not None]

    def one_sample(*tensors: Tensor) -> Any:  # noqa: ANN401
        own = list(values)
        for i, t in zip(moving, tensors, strict=True):
            axis = axes[i]
            own[i] = t if axis is None else t.flatten(axis.dim, axis.dim + 1)
        own_args, own_kwargs = tree_unflatten(own, spec)
        return call.func(*own_args, **own_kwargs)

    places = tuple(lifted[i][1] for i in moving)
    run = torch.vmap(one_sample, in_dims=places, randomness="different")
    try:
        with warnings.catch_warnings():
            # Where vmap has no rule it loops, and says so: correct, if slow.
            warnings.filterwarnings("ignore", "There is a performance drop")
            out = run(*(lifted[i][0] for i in moving))
        shapes = _shapes(call)
    except Exception as error:
        name = getattr(call.func, "__name__", str(call.func))
        raise trace.lost(f"{name!r} has no rule ({error})", *call.derived) from error
    return tree_map(lambda t, s: _joined(trace, t, s, first), out, shapes)


def _axis(trace: Trace, call: Call, value: Any) -> Axis | None:  # noqa: ANN401
    if not isinstance(value, Tensor) or not isinstance(trace.origin(value), Batched):
        return None
    axis = trace.axis(value)
    if axis is None:
        name = getattr(call.func, "__name__", str(call.func))
        problem = f"{name!r} of {tuple(value.shape)}, whose batch dimension is unknown"
        raise trace.lost(problem, *call.derived)
    return axis


def _shared(trace: Trace, value: Any, axis: Axis, size: int) -> Tensor | None:  # noqa: ANN401
    """A weight that was expanded to the batch, spread over the samples instead."""
    if not isinstance(value, Tensor):
        return None
    part = shared_part(trace, value, axis.dim, size)
    return None if part is None else spread(trace, part, axis, size)


def _lifted(trace: Trace, value: Any, axis: Axis | None) -> tuple[Any, int | None]:  # noqa: ANN401
    """A value as vmap takes it, and the dimension vmap is to run over."""
    if axis is not None:
        return axis.split(value), axis.dim + 1
    if isinstance(value, Tensor) and trace.sink(value) is not None:
        return spread(trace, value, Axis(-1, trace.batch), trace.batch), 0
    return value, None


def _shapes(call: Call) -> Any:  # noqa: ANN401
    """The shapes of the operation's results on the whole batch, without computing it."""
    args, kwargs = tree_map_only(
        Tensor, lambda t: t.detach().to("meta"), (call.args, call.kwargs)
    )
    return call.func(*args, **kwargs)


def _joined(trace: Trace, out: Tensor, whole: Tensor, axis: Axis) -> Tensor:
    """Results of the samples (B, *result) put back along the batch dimension."""
    dims = [d for d, n in enumerate(whole.shape) if n != out.shape[d + 1]]
    dim = dims[0] if dims else min(axis.dim, whole.ndim - 1)
    split = out.unflatten(dim + 1, (-1, axis.inner)).movedim(0, dim + 1)
    joined = split.reshape(whole.shape)
    trace.mark_axis(joined, axis.moved(dim))
    return joined
