"""Elementwise operations: the parameter gets an axis of samples, torch does the rest.

A parameter spread over the samples, (B, *parameter) without a copy, broadcasts exactly
as before, and the gradient that autograd returns for it is the per-sample gradient.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply, first_order
from dome.samples.store.sink import Sink
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.flow import assigned_axis, operations
from dome.samples.tracing.nested import Value
from dome.samples.tracing.trace import Call, Derived, Trace
from dome.torch_private import tree_map_only


def broadcast(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
    """Add, multiply, where, ...: anything that broadcasts its arguments."""
    if call.func in _ADDING and _are_totals(trace, call):
        return call.func(*args, **kwargs)
    x, axis = _leading(trace, call)
    args, kwargs = tree_map_only(
        Tensor, lambda t: _aligned(trace, t, x, axis), (args, kwargs)
    )
    return call.func(*args, **kwargs)


_ADDING = frozenset(
    operations(
        *("add", "sub", "subtract", "add_", "sub_", "rsub", "__add__", "__radd__"),
        *("__sub__", "__rsub__", "__iadd__", "__isub__"),
    )
)


def _are_totals(trace: Trace, call: Call) -> bool:
    """Whether a penalty on the weights is added to a loss: it is no sample's part."""
    scalars = all(t.ndim == 0 for t in (*call.batched, *call.derived))
    return scalars and all(trace.axis(t) is None for t in call.batched)


def concatenate(
    trace: Trace,
    call: Call,
    tensors: Value,
    dim: int = 0,
    **options: Value,
) -> Tensor:
    """``cat`` and ``stack`` of samples and parameters, along any other dimension."""
    x, axis = _leading(trace, call)
    stacked = call.func is torch.stack
    if not stacked and dim % x.ndim == axis.dim:
        raise trace.lost("it is concatenated to them as one more", *call.derived)
    tensors = [_aligned(trace, t, x, axis) for t in tensors]
    out: Tensor = call.func(tensors, dim=dim, **options)
    before = stacked and dim % out.ndim <= axis.dim
    trace.mark_axis(out, axis.moved(axis.dim + before))
    return out


def assign(trace: Trace, call: Call, x: Tensor, index: Value, value: Value) -> None:
    """``x[index] = value`` where one of the two holds samples and the other weights."""
    axis = trace.axis(x)
    if axis is not None:
        with trace.resume():
            target = x[index]
        inside = trace.axis(target)
        if inside is not None:
            call.func(x, index, _aligned(trace, value, target, inside))
            return
    elif isinstance(trace.origin(x), Derived):
        inside = trace.axis(value) if isinstance(value, Tensor) else None
        held = inside and assigned_axis(x, index, value, inside)
        if held is not None:
            # From here on x holds samples; what it held before is a weight to each.
            apply(_Held, x, trace.sink(x), held)
            trace.mark_axis(x, held)
            call.func(x, index, value)
            return
    raise trace.lost(f"it is assigned into {tuple(x.shape)}", *call.derived)


def scale_and_shift(
    trace: Trace,
    axis: Axis,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    end: int,
) -> Tensor:
    """Weight times x plus bias, laid along the dimensions of x that end at ``end``."""
    tail, dtype = (1,) * (x.ndim - end), x.dtype
    with trace.resume():
        trace.mark_axis(x, axis)
        if weight is not None:
            x = x * (weight.view(*weight.shape, *tail) if tail else weight)
        if bias is not None:
            x = x + (bias.view(*bias.shape, *tail) if tail else bias)
        # Torch's norms return the type of their input, whatever the weight's.
        return x.to(dtype)


def spread(trace: Trace, t: Tensor, axis: Axis, size: int) -> Tensor:
    """A weight with its own copy for every sample, as a view.

    Args:
        trace: Knows where the weight comes from.
        t: The weight; along ``axis.dim`` of size 1, or ``size`` if it holds a part
            for each sample already.
        axis: Where the samples are to lie.
        size: Length of that dimension.
    """
    sink = trace.sink(t)
    if sink is None:
        return t
    return apply(_Spread, t, sink, axis, size)


def spread_copies(trace: Trace, t: Tensor, axis: Axis, size: int) -> Tensor | None:
    """A weight that was copied for each sample, such as a class token, spread instead.

    None if it was not: then it is whole to each sample, or holds a part for each.
    """
    origin, dim = trace.origin(t), axis.dim
    base = origin.copied if isinstance(origin, Derived) else None
    if base is None or not 0 <= dim < t.ndim or t.shape[dim] != size:
        return None
    before = t.ndim - base.ndim
    if all(
        old in (1, new) for old, new in zip(base.shape, t.shape[before:], strict=True)
    ):
        if before <= dim and base.shape[dim - before] != 1:
            return None
        with trace.resume():
            part = base.expand(*t.shape[:dim], 1, *t.shape[dim + 1 :])
        return spread(trace, part, axis, size)
    if dim == before == 0 and size == axis.batch * axis.inner == axis.batch * len(base):
        # (heads, ...) repeated to (B·heads, ...), as relative attention does.
        each = spread(trace, base, Axis(-1, axis.batch), axis.batch)
        return each.flatten(0, 1) if each.shape[2:] == t.shape[1:] else None
    return None


def _leading(trace: Trace, call: Call) -> tuple[Tensor, Axis]:
    """The argument whose samples the parameters are lined up with."""
    known = trace.leading(call.batched)
    if known:
        return known[0]
    shape = tuple(call.batched[0].shape)
    raise trace.lost(
        f"it meets {shape}, whose batch dimension is unknown", *call.derived
    )


def _aligned(trace: Trace, t: Tensor, x: Tensor, axis: Axis) -> Tensor:
    """A tracked weight spread over the samples of x; anything else as it is."""
    if not isinstance(t, Tensor) or not isinstance(trace.origin(t), Derived):
        return t
    size, place = x.shape[axis.dim], t.ndim - (x.ndim - axis.dim)
    copies = spread_copies(trace, t, axis.moved(place), size)
    if copies is not None:
        return copies
    if place >= 0 and t.shape[place] not in (1, size):
        problem = f"its shape {tuple(t.shape)} does not line up with {tuple(x.shape)}"
        raise trace.lost(problem, t)
    return spread(trace, t, axis.moved(place), size)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Context, t: Tensor, sink: Sink, axis: Axis, size: int) -> Tensor:
        ctx.shape, ctx.sink, ctx.axis = t.shape, sink, axis
        if axis.dim < 0:
            ones = (1,) * (-axis.dim - 1)
            return t.view(1, *ones, *t.shape).expand(size, *ones, *t.shape)
        shape = list(t.shape)
        shape[axis.dim] = size
        return t.expand(shape)

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        shape, sink, axis = ctx.shape, ctx.sink, ctx.axis
        if not sink.wanted():
            return None, None, None, None
        dim = max(axis.dim, 0)
        held = axis.dim >= 0 and shape[dim] == delta.shape[dim] > 1
        parts = axis.moved(dim).split(delta).movedim(dim + 1, 0)
        if held:
            grads = _embedded(parts, dim).reshape(axis.batch, *shape)
        else:
            grads = parts.sum((dim + 1, dim + 2)).reshape(axis.batch, *shape)
        sink.put(grads)
        return grads.sum(0), None, None, None


class _Held(Function):
    """In place: a weight that holds a part for each sample starts to hold samples."""

    @staticmethod
    def forward(ctx: Context, t: Tensor, sink: Sink, axis: Axis) -> Tensor:
        ctx.mark_dirty(t)
        ctx.sink, ctx.axis = sink, axis
        return t

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        axis = ctx.axis
        if ctx.sink.wanted():
            parts = axis.split(delta).movedim(axis.dim + 1, 0)
            ctx.sink.put(_embedded(parts, axis.dim).reshape(axis.batch, *delta.shape))
        return delta, None, None


def _embedded(parts: Tensor, dim: int) -> Tensor:
    """Samples' own parts (B, .., outer, inner, ..) of a weight, zeros elsewhere."""
    batch = len(parts)
    before, after = parts.shape[1 : dim + 2], parts.shape[dim + 2 :]
    grads = parts.new_zeros(batch, *before, batch, *after)
    grads.diagonal(dim1=0, dim2=dim + 2).copy_(parts.movedim(0, -1))
    return grads
