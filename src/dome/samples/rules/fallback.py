"""Any other operation: vmap over the samples, each with a copy of the weight.

Slower than a rule, but right for whatever vmap understands: the forward runs once,
vectorised over samples, and autograd does the backward.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from dome.samples.rules.broadcast import spread, spread_copies
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.trace import Batched, Call, Trace
from dome.torch_private import tree_flatten, tree_map, tree_map_only, tree_unflatten


def fallback(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
    """Run an operation without a rule once for each sample, vectorised."""
    values, spec = tree_flatten((args, kwargs))
    axes = _axes(trace, call, values)
    moving = {i: _lifted(trace, values[i], axis) for i, axis in axes.items()}

    def one_sample(*own: Tensor, dtype: torch.dtype | None = None) -> Value:
        mine = list(values)
        for i, t in zip(moving, own, strict=True):
            axis = axes[i]
            mine[i] = t if axis is None else t.flatten(axis.dim, axis.dim + 1)
        own_args, own_kwargs = tree_unflatten([_cast(v, dtype) for v in mine], spec)
        return call.func(*own_args, **own_kwargs)

    stacks, places = zip(*moving.values(), strict=True)
    try:
        dtype = _autocast_type(call, one_sample, stacks, places)
        with warnings.catch_warnings():
            # Where vmap has no rule either it loops, and says so: correct, if slow.
            warnings.filterwarnings("ignore", "There is a performance drop")
            run = torch.vmap(one_sample, in_dims=places, randomness="different")
            out = run(*stacks, dtype=dtype)
        shapes = _shapes(call, dtype)
    except Exception as error:
        problem = f"{_name(call)!r} has no rule ({error})"
        raise trace.lost(problem, *call.derived) from error
    first = next(axis for axis in axes.values() if axis is not None)
    return tree_map(lambda t, whole: _joined(trace, t, whole, first), out, shapes)


def _axes(trace: Trace, call: Call, values: list[Value]) -> dict[int, Axis | None]:
    """Which values differ from sample to sample, and along what; None for weights.

    A weight that was expanded to the batch, as a class token is, is replaced by one
    that is spread over the samples.
    """
    axes: dict[int, Axis | None] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and isinstance(trace.origin(value), Batched):
            axes[i] = trace.axis(value)
            if axes[i] is None:
                problem = (
                    f"{_name(call)!r} of {tuple(value.shape)}, which hides the batch"
                )
                raise trace.lost(problem, *call.derived)
    place, first = next((i, axis) for i, axis in axes.items() if axis is not None)
    size = values[place].shape[first.dim]
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and trace.sink(value) is not None:
            copies = spread_copies(trace, value, first, size)
            values[i] = value if copies is None else copies
            axes[i] = None if copies is None else first
    return axes


def _lifted(trace: Trace, value: Tensor, axis: Axis | None) -> tuple[Tensor, int]:
    """A value as vmap takes it, and the dimension vmap is to run over."""
    if axis is None:
        return spread(trace, value, Axis(-1, trace.batch), trace.batch), 0
    return axis.split(value), axis.dim + 1


def _autocast_type(
    call: Call,
    run: Callable[..., Value],
    stacks: Value,
    places: Value,
) -> torch.dtype | None:
    """The type autocast chooses, which vmap does not see: one sample outside tells."""
    if not torch.is_autocast_enabled(call.batched[0].device.type):
        return None
    with torch.no_grad():
        pairs = zip(stacks, places, strict=True)
        return next(tensors(run(*(t.select(place, 0) for t, place in pairs)))).dtype


def _cast(value: Value, dtype: torch.dtype | None) -> Value:
    real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if real and dtype is not None else value


def _shapes(call: Call, dtype: torch.dtype | None) -> Value:
    """The operation's results on the whole batch, their shapes without their values."""
    args, kwargs = tree_map_only(
        Tensor, lambda t: _cast(t.detach().to("meta"), dtype), (call.args, call.kwargs)
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


def _name(call: Call) -> str:
    return getattr(call.func, "__name__", str(call.func))
