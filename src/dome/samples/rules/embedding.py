"""Embeddings: each sample's gradient scattered to the rows of the table it used."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.fallback import fallback
from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.recording import recording
from dome.samples.store.sink import Site
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.trace import Trace
from dome.trackers.factors import OneHot, Vectors

_MATRIX = 2  # dimensions


def embedding(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding``: input (...) of indices, weight (V, E)."""
    _refuse(trace, weight, scale_grad_by_freq)
    axis = trace.place(input)
    if axis is None:
        raise trace.lost(f"an embedding of {tuple(input.shape)}", weight)
    # Once filtered, a gradient has numbers in every row: it is dense from the start.
    del max_norm, norm_type, sparse
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    axis = axis.deeper()
    site = Site(axis, trace.sink(weight), None)
    out: Tensor = apply(_Embedding, weight, input, site, padding, call.run)
    trace.mark_axis(out, axis)
    return out


@recording
def lookup(trace: Trace, call: Call, x: Tensor, *where: Value, **named: Value) -> Value:
    """``weight[index]`` and ``weight.index_select(0, index)``, samples as the index."""
    if call.func is torch.Tensor.__getitem__:
        dim, index = 0, where[0]
    else:
        dim, index = (*where, *named.values())
    rows = isinstance(index, Tensor) and index.dtype == torch.int64 and dim == 0
    if not rows or trace.place(index) is None or trace.sink(x) is None:
        return fallback(trace, call, *call.args, **call.kwargs)
    with trace.resume():
        flat = x if x.ndim == _MATRIX else x.reshape(len(x), -1)
        out = F.embedding(torch.remainder(index, len(x)), flat)
        return out.reshape(index.shape + x.shape[1:])


@recording
def embedding_bag(
    trace: Trace,
    _: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding_bag`` of bags (N, T), or of flat indices with offsets."""
    _refuse(trace, weight, scale_grad_by_freq)
    del sparse
    factors, keep = per_sample_weights, None
    with trace.resume():
        if offsets is not None:
            ends = offsets[1:] if include_last_offset else None
            starts = offsets[:-1] if include_last_offset else offsets
            places, keep = _windows(starts, ends, len(input))
            input = input[places]  # noqa: A001
            factors = None if factors is None else factors[places]
            if len(input) == trace.batch:
                trace.mark_axis(input, Axis(0, trace.batch))
        if padding_idx is not None:
            real = input != padding_idx % len(weight)
            keep = real if keep is None else keep & real
        values = F.embedding(input, weight, padding_idx, max_norm, norm_type)
        if factors is not None:
            values = values * factors[..., None]
        return _reduced(values, keep, mode)


def _windows(starts: Tensor, ends: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
    """Flat positions (N, T) of the entries of each bag, and which of them are real."""
    if ends is None:
        ends = torch.cat([starts[1:], starts.new_tensor([total])])
    lengths = ends - starts
    steps = torch.arange(max(int(lengths.max()), 1), device=starts.device)
    places = (starts[:, None] + steps).clamp(max=max(total - 1, 0))
    return places, steps < lengths[:, None]


def _reduced(values: Tensor, keep: Tensor | None, mode: str) -> Tensor:
    """Sum, mean or maximum of values (N, T, E) over T; an empty bag gives zeros."""
    if mode == "max":
        if keep is None:
            return values.max(1).values
        low = values.masked_fill(~keep[..., None], -torch.inf).max(1).values
        return low.masked_fill(~keep.any(1, keepdim=True), 0)
    if keep is None:
        return values.sum(1) if mode == "sum" else values.mean(1)
    total = values.masked_fill(~keep[..., None], 0).sum(1)
    return total if mode == "sum" else total / keep.sum(1, keepdim=True).clamp(min=1)


def _refuse(trace: Trace, weight: Tensor, by_frequency: bool) -> None:
    if by_frequency:
        raise RuntimeError(
            f"{trace.layer(weight)} has scale_grad_by_freq=True, which per-sample "
            f"gradients do not support: construct it with scale_grad_by_freq=False, or "
            'use samples="microbatch"'
        )


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Context,
        weight: Tensor,
        indices: Tensor,
        site: Site,
        padding: int,
        run: Callable[[], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.site, ctx.padding, ctx.shape = site, padding, weight.shape
        return run()

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        site: Site = ctx.site
        if not site.wants_weight():
            return None, None, None, None, None
        if site.weight is not None:
            _scatter(site, indices, delta, ctx.padding, ctx.shape)
        total = torch.ops.aten.embedding_dense_backward(
            delta, indices, ctx.shape[0], ctx.padding, False
        )
        return total, None, None, None, None


def _scatter(
    site: Site, indices: Tensor, delta: Tensor, padding: int, shape: torch.Size
) -> None:
    """Add δ (B, T, E) to the rows (B, V, E) that the indices (B, T) name."""
    sink = site.weight
    if sink is None:
        return
    if padding >= 0:
        delta = delta.masked_fill((indices == padding)[..., None], 0)
    values = site.axis.samples_first(delta)
    words = site.axis.samples_first(indices[..., None])
    if sink.keep(OneHot(words[..., 0], shape[0]), Vectors(values)):
        return
    rows = words.expand_as(values)
    room = sink.room(values.dtype, zero=True)
    if room is None:
        grads = values.new_zeros(site.axis.batch, *shape)
        sink.put(grads.scatter_add_(1, rows, values))
    else:
        room.scatter_add_(1, rows, values)
