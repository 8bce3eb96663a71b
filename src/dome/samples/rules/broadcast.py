"""Elementwise operations: the parameter gets an axis of samples, torch does the rest.

A parameter spread over the samples, (B, *parameter) without a copy, broadcasts exactly
as before, and the gradient that autograd returns for it is the per-sample gradient.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.numbered import spread_by_number
from dome.samples.rules.recording import recording
from dome.samples.store.sink import Sink
from dome.samples.tracing.axis import Axis, Labels, assigned_axis, collapsed
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call, Derived, Place
from dome.samples.tracing.refuse import are_totals
from dome.samples.tracing.trace import Trace


@recording
def broadcast(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
    """Add, multiply, where, ...: anything that broadcasts its arguments."""
    if are_totals(call):
        return call.func(*args, **kwargs)
    x, place = _leading(trace, call)
    own = {name: aligned(trace, t, x, place) for name, t in kwargs.items()}
    return call.func(*[aligned(trace, t, x, place) for t in args], **own)


@recording
def concatenate(
    trace: Trace,
    call: Call,
    tensors: Value,
    dim: int = 0,
    **options: Value,
) -> Tensor:
    """``cat`` and ``stack`` of samples and parameters, along any other dimension."""
    x, place = _leading(trace, call)
    stacked = call.func is torch.stack
    if not stacked and isinstance(place, Labels) and len(place.dims) > 1:
        place = _one_along(trace, place, dim % x.ndim, *call.derived)
    along = place.dims if isinstance(place, Labels) else (place.dim,)
    if not stacked and dim % x.ndim in along:
        raise trace.lost("it is concatenated to them as one more", *call.derived)
    tensors = [aligned(trace, t, x, place) for t in tensors]
    out: Tensor = call.func(tensors, dim=dim, **options)
    if isinstance(place, Labels):
        ids = place.ids.unsqueeze(dim) if stacked else place.ids
        trace.mark_axis(out, Labels(ids, place.batch))
    else:
        before = stacked and dim % out.ndim <= place.dim
        trace.mark_axis(out, place.moved(place.dim + before))
    return out


def _one_along(trace: Trace, place: Labels, dim: int, *weights: Tensor) -> Labels:
    """The same samples, if a dimension that a weight is joined along has one each."""
    ids, several = collapsed(place.ids, (dim,))
    error = trace.lost("it is concatenated to several of them", *weights)
    trace.questions.raise_if(several, error)
    return Labels(ids, place.batch)


@recording
def assign(trace: Trace, call: Call, x: Tensor, index: Value, value: Value) -> None:
    """``x[index] = value`` where one of the two holds samples and the other weights."""
    if trace.place(x) is not None:
        with trace.resume():
            target = x[index]
        inside = trace.place(target)
        if inside is not None:
            call.func(x, index, aligned(trace, value, target, inside))
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
    axis: Place,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    end: int,
) -> Tensor:
    """Weight times x plus bias, laid along the dimensions of x that end at ``end``."""
    tail, dtype = (1,) * (x.ndim - end), x.dtype

    def lined_up(t: Tensor) -> Tensor:
        with trace.resume():
            t = t.view(t.shape + tail) if tail else t
        return aligned(trace, t, x, axis)

    if weight is not None:
        x = x * lined_up(weight)
    if bias is not None:
        x = x + lined_up(bias)
    # Torch's norms return the type of their input, whatever the weight's.
    x = x.to(dtype)
    trace.mark_axis(x, axis)
    return x


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


def _leading(trace: Trace, call: Call) -> tuple[Tensor, Place]:
    """The argument whose samples the parameters are lined up with."""
    known = call.known()
    if known:
        return known[0]
    shape = tuple(call.batched[0].shape)
    raise trace.lost(
        f"it meets {shape}, whose batch dimension is unknown", *call.derived
    )


def aligned(trace: Trace, t: Tensor, x: Tensor, axis: Place) -> Tensor:
    """A tracked weight spread over the samples of x; anything else as it is."""
    if not isinstance(t, Tensor) or not isinstance(trace.origin(t), Derived):
        return t
    if isinstance(axis, Labels):
        return spread_by_number(trace, t, axis.ids)
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
