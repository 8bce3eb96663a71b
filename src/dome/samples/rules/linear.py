"""Linear and matmul: G[b] = Σ_t δ[b, t] a[b, t]ᵀ over the positions t of sample b."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.broadcast import broadcast
from dome.samples.rules.fallback import fallback
from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.product import product
from dome.samples.rules.recording import recording
from dome.samples.store.sink import Site
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.origins import Call, Place
from dome.samples.tracing.refuse import settled
from dome.samples.tracing.trace import Trace
from dome.torch_private import not_a_view
from dome.trackers.factors import Vectors

# Up to so many positions a sample, one more product is cheaper than summing the rows.
_FEW_POSITIONS = 4

_MATRIX = 2  # dimensions


def linear(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """``F.linear``: input (..., in), weight (out, in)."""
    if any(t is weight for t in call.batched):
        return fallback(trace, call, input, weight, bias)  # the weight holds samples
    place = settled(trace, trace.place(input), input.ndim - 1, weight, bias)
    if place is None or weight.ndim != _MATRIX:
        raise trace.lost(f"a linear map of {tuple(input.shape)}", weight, bias)
    return linear_along(trace, place, input, weight, bias, call.run)


def linear_along(
    trace: Trace,
    place: Place,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    run: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Captured ``F.linear`` of x (..., in) whose samples lie in ``place``.

    Args:
        trace: Knows where the weights come from.
        place: Where x holds its samples.
        x: The input.
        weight: The weight, shape (out, in).
        bias: The bias, shape (out,).
        run: Computes the value, if the operation is a linear map and no part of one.
    """
    site = Site(place, trace.sink(weight), trace.sink(bias))
    run = run or partial(F.linear, x, weight, bias)
    out: Tensor = apply(_Linear, x, weight, bias, site, run)
    trace.mark_axis(out, place)
    return out


def matmul(trace: Trace, call: Call, input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """``x @ W`` with W (in, out), or any product of stacks of matrices."""
    stacked = min(input.ndim, other.ndim) >= _MATRIX
    known = trace.place(input) is not None
    if trace.sink(other) is not None and other.ndim == _MATRIX and known:
        place = settled(trace, trace.place(input), input.ndim - 1, other)
        if place is not None:
            site = Site(place, trace.sink(other), None, True)
            out: Tensor = apply(_Linear, input, other, None, site, call.run)
            trace.mark_axis(out, place)
            return out
    elif stacked and all(_in_stack(trace, t) for t in call.batched):
        out = broadcast(trace, call, input, other)
        _mark_stack(trace, call, out)
        return out
    return fallback(trace, call, input, other)


def _mark_stack(trace: Trace, call: Call, out: Tensor) -> None:
    """A product of stacks holds its samples where the leading stack does."""
    x, place = call.known()[0]
    if isinstance(place, Axis):
        trace.mark_axis(out, place.moved(out.ndim - x.ndim + place.dim))


def _in_stack(trace: Trace, x: Tensor) -> bool:
    place = trace.place(x)
    return place is not None and place.last < x.ndim - _MATRIX


def addmm(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    mat1: Tensor,
    mat2: Tensor,
    **scales: float,
) -> Tensor:
    """``torch.addmm(bias, x, W)``."""
    if scales or trace.place(mat1) is None:
        return fallback(trace, call, *call.args, **call.kwargs)
    place = settled(trace, trace.place(mat1), 1, mat2, input)
    weights = [t for t in (input, mat2) if trace.place(t) is None]
    if place is None or len(weights) < 2 or input.shape != mat2.shape[1:]:
        return _added(trace, call, input, mat1, mat2)
    site = Site(place, trace.sink(mat2), trace.sink(input), True)
    out: Tensor = apply(_Linear, mat1, mat2, input, site, call.run)
    trace.mark_axis(out, place)
    return out


def baddbmm(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    batch1: Tensor,
    batch2: Tensor,
    **scales: float,
) -> Tensor:
    """``torch.baddbmm(bias, x, W)`` of stacks of matrices."""
    batches = [t for t in call.batched if t is not input]
    if all(_in_stack(trace, t) for t in batches) and batches:
        out = broadcast(trace, call, *call.args, **call.kwargs)
        _mark_stack(trace, call, out)
        return out
    if scales:
        return fallback(trace, call, *call.args, **call.kwargs)
    return _added(trace, call, input, batch1, batch2)


@recording
def _added(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """A product of matrices, or of stacks of them, plus another."""
    with trace.resume():
        out = torch.matmul(a, b)
        return out + input.to(out.dtype)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004 (gets a gradient)
        site: Site,
        run: Callable[[], Tensor],
    ) -> Tensor:
        # Of more than two dimensions it views the product's rows, and autograd lets
        # nobody write in place to a view that a function made.
        out = not_a_view(run())
        # Under autocast the product was taken in the type of the result.
        ctx.save_for_backward(x.to(out.dtype), weight.to(out.dtype))
        ctx.site = site
        return out

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        site: Site = ctx.site
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = delta.matmul(weight.T if site.transposed else weight)
        d, a = site.axis.samples_first(delta), site.axis.samples_first(x)
        if ctx.needs_input_grad[2] and site.wants_bias():
            db = site.bias_total(d.sum(1))
        if site.transposed:
            d, a = a, d
        if ctx.needs_input_grad[1] and site.wants_weight():
            dw = weight_gradient(site, d, a)
        return dx, dw, db, None, None


def weight_gradient(site: Site, d: Tensor, a: Tensor) -> Tensor:
    """Store d[b]ᵀ a[b] of d (B, T, out) and a (B, T, in); their sum over b."""
    sink = site.weight
    if sink is None or (sink.keeps_products and sink.keep(Vectors(d), Vectors(a))):
        return d.flatten(0, 1).T @ a.flatten(0, 1)
    room = sink.room(d.dtype)
    grads = product(d.mT, a, room)
    if room is None:
        sink.put(grads)
    if d.shape[1] > _FEW_POSITIONS:
        return grads.sum(0)
    return d.flatten(0, 1).T @ a.flatten(0, 1)
