"""Normalisations: G_weight[b] = Σ δ x̂ and G_bias[b] = Σ δ over the positions of b."""

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.broadcast import scale_and_shift
from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.recording import recording
from dome.samples.store.sink import Site
from dome.samples.tracing.origins import Call
from dome.samples.tracing.refuse import mixes_samples, settled
from dome.samples.tracing.trace import Trace


def group_norm(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.group_norm``: input (N, C, ...)."""
    axis = settled(trace, trace.place(input), 1, weight, bias)
    if axis is None:
        raise trace.lost(f"a group norm of {tuple(input.shape)}", weight, bias)
    site = Site(axis, trace.sink(weight), trace.sink(bias))
    x = _autocast_input(input)
    # Of other layouts torch has other kernels, which keep no statistics for us.
    run = None if x.is_contiguous() else call.run
    x = x.contiguous()
    out: Tensor = apply(_GroupNorm, x, weight, bias, site, num_groups, eps, run)
    trace.mark_axis(out, axis)
    return out


def layer_norm(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm``: input (..., *normalized_shape)."""
    end = input.ndim - len(normalized_shape)
    axis = settled(trace, trace.place(input), end, weight, bias)
    if axis is None:
        raise trace.lost(f"a layer norm of {tuple(input.shape)}", weight, bias)
    site = Site(axis, trace.sink(weight), trace.sink(bias))
    x = _autocast_input(input)
    out: Tensor = apply(_LayerNorm, x, weight, bias, site, list(normalized_shape), eps)
    trace.mark_axis(out, axis)
    return out


@recording
def rms_norm(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """``F.rms_norm``, its weight applied on its own."""
    end = input.ndim - len(normalized_shape)
    axis = settled(trace, trace.place(input), end, weight)
    if axis is None:
        raise trace.lost(f"an RMS norm of {tuple(input.shape)}", weight)
    x = F.rms_norm(input, list(normalized_shape), None, eps)
    return scale_and_shift(trace, axis, x, weight, None, input.ndim)


@recording
def instance_norm(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm``, its weight and bias applied on their own."""
    axis = settled(trace, trace.place(input), 1, weight, bias)
    if axis is None:
        raise trace.lost(f"an instance norm of {tuple(input.shape)}", weight, bias)
    # The operation itself has moved its running statistics already.
    statistics = (None, None) if use_input_stats else (running_mean, running_var)
    x = F.instance_norm(input, *statistics, None, None, use_input_stats, momentum, eps)
    return scale_and_shift(trace, axis, x, weight, bias, 2)


def batch_norm(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` with running statistics; with the batch's own it is refused."""
    del momentum
    if not torch.is_grad_enabled():
        return call.func(*call.args, **call.kwargs)
    if training:
        layer = trace.layer(weight, bias, running_mean, running_var)
        raise RuntimeError(mixes_samples(layer))
    return _frozen_batch_norm(
        trace, call, input, running_mean, running_var, weight, bias, eps
    )


@recording
def _frozen_batch_norm(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """The same with running statistics, its weight and bias applied on their own."""
    axis = settled(trace, trace.place(input), 1, weight, bias)
    if axis is None:
        raise trace.lost(f"a batch norm of {tuple(input.shape)}", weight, bias)
    x = F.batch_norm(input, running_mean, running_var, eps=eps)
    return scale_and_shift(trace, axis, x, weight, bias, 2)


def _autocast_input(x: Tensor) -> Tensor:
    """On CUDA, autocast runs these norms in float32; on CPU it leaves them alone."""
    kind = x.device.type
    return x.float() if kind == "cuda" and torch.is_autocast_enabled(kind) else x


class _GroupNorm(Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        site: Site,
        num_groups: int,
        eps: float,
        run: Callable[[], Tensor] | None,
    ) -> Tensor:
        num, channels = x.shape[:2]
        sizes = (num, channels, prod(x.shape[2:]), num_groups)
        out, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.site, ctx.sizes = site, sizes
        return out if run is None else run()

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        site: Site = ctx.site
        num, channels, places, groups = ctx.sizes
        if weight is None:
            weight = x.new_ones(channels)
        # The batch taken as one sample of N times the groups: the gradients of its
        # N·C weights are those of each row, from the same fused kernel.
        joined = (1, num * channels, places)
        masks = list(ctx.needs_input_grad[:3])
        dx, dw, db = torch.ops.aten.native_group_norm_backward(
            *(delta.reshape(joined).contiguous(), x.view(joined)),
            *(mean.view(1, -1), rstd.view(1, -1)),
            *(weight.expand(num, channels).reshape(-1), *joined, num * groups, masks),
        )
        dx = dx.view(x.shape) if masks[0] else None
        wanted = (masks[1] and site.wants_weight(), masks[2] and site.wants_bias())
        each, fold = (num, channels), site.axis.fold
        dw = site.weight_total(fold(dw.view(each))) if wanted[0] else None
        db = site.bias_total(fold(db.view(each))) if wanted[1] else None
        return dx, dw, db, None, None, None, None


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        site: Site,
        shape: list[int],
        eps: float,
    ) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.site, ctx.shape = site, shape
        return out

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        site: Site = ctx.site
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            mask = [True, False, False]
            dx = torch.ops.aten.native_layer_norm_backward(
                delta, x, ctx.shape, mean, rstd, weight, bias, mask
            )[0]
        if ctx.needs_input_grad[1] and site.wants_weight():
            products = (x - mean).mul_(rstd).mul_(delta)
            dw = site.weight_total(_by_sample(site, products, ctx.shape))
        if ctx.needs_input_grad[2] and site.wants_bias():
            db = site.bias_total(_by_sample(site, delta, ctx.shape))
        return dx, dw, db, None, None, None


def _by_sample(site: Site, x: Tensor, shape: list[int]) -> Tensor:
    """Sum x (..., *shape) over the positions of each sample, shape (B, *shape)."""
    flat = x.flatten(-len(shape))
    return site.axis.samples_first(flat).sum(1).view(-1, *shape)
