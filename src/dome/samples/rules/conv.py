"""Convolutions: the weight gradient of every sample in one grouped convolution.

The samples become groups of one big image: x as (1, N·in, ...) against δ as
(1, N·out, ...) with N times the groups. Where such kernels are slow, one batched
product with the unfolded input (im2col) is used instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.product import chunks, product
from dome.samples.store.sink import Site
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call, Place
from dome.samples.tracing.refuse import settled
from dome.samples.tracing.trace import Trace
from dome.trackers.factors import Maps, Patches

_FEW_CHANNELS = 8
# Samples at a time, and numbers. With two threads and 128 samples, 64 in a grouped
# kernel took half the time of 4, and in an unfolded product a tenth (3 to 16 channels)
# to a quarter (kernels of one point) less than 16; results of several megabytes may
# cost more in fresh pages than in arithmetic.
_AT_ONCE = 64
_NUMBERS_AT_ONCE = {False: 1 << 19, True: 1 << 21}  # grouped, unfolded
# Numbers of a result that is kept as the kernel made it, where that may be: copying it
# took 10 of 87 ms of backward at B = 128. 24 MiB, which glibc
# comes to keep by itself.
_NUMBERS_KEPT = 6 << 20

Sizes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of a convolution, one for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def backward(
        self, delta: Tensor, x: Tensor, weight: Tensor, mask: list[bool], times: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Torch's own backward with ``times`` as many groups."""
        return torch.ops.aten.convolution_backward(
            delta,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            times * self.groups,
            mask,
        )


def conv(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """``F.conv1d``, ``F.conv2d`` and ``F.conv3d``."""
    rank = weight.ndim - 2
    axis = _axis(trace, input, weight, bias)
    dilations = _each(dilation, rank)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        # Torch puts the odd element of an asymmetric padding at the end.
        ends = [n for total in reversed(totals) for n in (0, total % 2)]
        input = F.pad(input, ends) if any(ends) else input  # noqa: A001
        padding = tuple(total // 2 for total in totals)
    elif padding == "valid":
        padding = 0
    paddings = _each(padding, rank)
    zeros = (0,) * rank
    geometry = Geometry(_each(stride, rank), paddings, dilations, False, zeros, groups)
    return _captured(trace, call, axis, input, weight, bias, geometry)


def conv_transpose(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """``F.conv_transpose1d``, ``F.conv_transpose2d`` and ``F.conv_transpose3d``."""
    rank = weight.ndim - 2
    axis = _axis(trace, input, weight, bias)
    geometry = Geometry(
        _each(stride, rank),
        _each(padding, rank),
        _each(dilation, rank),
        True,
        _each(output_padding, rank),
        groups,
    )
    return _captured(trace, call, axis, input, weight, bias, geometry)


def _captured(
    trace: Trace,
    call: Call,
    axis: Place,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    site = Site(axis, trace.sink(weight), trace.sink(bias))
    out: Tensor = apply(_Conv, x, weight, bias, site, geometry, call.run)
    trace.mark_axis(out, axis)
    return out


def _axis(trace: Trace, x: Tensor, weight: Tensor, bias: Tensor | None) -> Place:
    axis = settled(trace, trace.place(x), 1, weight, bias)
    if axis is None or x.ndim != weight.ndim:
        raise trace.lost(f"a convolution of {tuple(x.shape)}", weight, bias)
    return axis


def _each(size: Value, rank: int) -> tuple[int, ...]:
    return (
        (size,) * rank if isinstance(size, int) else tuple(size) * (rank // len(size))
    )


class _Conv(Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004 (gets a gradient)
        site: Site,
        geometry: Geometry,
        run: Callable[[], Tensor],
    ) -> Tensor:
        out = run()
        if x.dtype != out.dtype or weight.dtype != out.dtype:
            # Under autocast the convolution ran in the type of the result.
            x, weight = x.to(out.dtype), weight.to(out.dtype)
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.geometry = site, geometry
        return out

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        site: Site = ctx.site
        geometry: Geometry = ctx.geometry
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = geometry.backward(delta, x, weight, [True, False, False])[0]
        if ctx.needs_input_grad[1] and site.wants_weight():
            dw = _weight_gradient(site, delta, x, weight, geometry)
        if ctx.needs_input_grad[2] and site.wants_bias():
            db = site.bias_total(site.axis.fold(delta.flatten(2).sum(2)))
        return dx, dw, db, None, None, None


def _weight_gradient(
    site: Site, delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
) -> Tensor:
    """Store the weight gradient of each sample, return their sum."""
    whole = site.axis.is_whole(x)
    sink, kept = site.weight, False
    if sink is not None and sink.keeps_products and whole and geometry.groups == 1:
        kept = sink.keep(*_sides(delta, x, weight, geometry))
    if sink is None or kept:
        return geometry.backward(delta, x, weight, [False, True, False])[1]
    unfold = _cheaper_unfolded(delta, x, weight, geometry)
    is_small = x.shape[0] * weight.numel() <= _NUMBERS_KEPT
    if sink.keeps_products and whole and is_small and not unfold:
        rows = _grouped(delta, x, weight.shape, geometry)
        sink.put(site.axis.fold(rows))
        return rows.sum(0)
    room = sink.room(delta.dtype) if whole else None
    rows = delta.new_empty((x.shape[0], *weight.shape)) if room is None else room
    write = _write_unfolded if unfold else _write_grouped
    places = prod(delta.shape[2:]) if unfold else weight.shape[0]
    size = prod(weight.shape[1:]) * places
    total = None
    for part in chunks(x.shape[0], size, _AT_ONCE, _NUMBERS_AT_ONCE[unfold]):
        some_rows = rows[part]
        write(some_rows, delta[part], x[part], geometry)
        some = some_rows.sum(0)
        total = some if total is None else total.add_(some)
    if room is None:
        sink.put(site.axis.fold(rows))
    return weight.new_zeros(weight.shape) if total is None else total


def _sides(
    delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
) -> tuple[Maps, Patches]:
    """What the samples of a weight, without groups, are products of."""
    # A transposed convolution's weight is (in, out, ...): it is that of the one back.
    maps, image = (x, delta) if geometry.transposed else (delta, x)
    kernel = tuple(weight.shape[2:])
    steps = geometry.stride, geometry.padding, geometry.dilation
    return Maps(maps), Patches(image, kernel, *steps)


def _cheaper_unfolded(
    delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
) -> bool:
    """Whether im2col beats the grouped kernel: few channels, or few places.

    Measured on CPU: 3 to 16 channels at 32x32, 0.46 ms against 1.3 ms for 16 samples;
    128 to 128 at 4x4, 1.5 ms against 3.1 ms; 16 to 16 at 32x32, 1.8 ms against 0.96 ms;
    64 to 64 at 8x8, 3.0 ms against 1.1 ms on two threads.
    """
    if geometry.groups > 1 or geometry.transposed:
        return False
    point, places = prod(weight.shape[2:]) == 1, prod(delta.shape[2:])
    return point or x.shape[1] < _FEW_CHANNELS or 2 * places <= weight.shape[0]


def _write_grouped(out: Tensor, delta: Tensor, x: Tensor, geometry: Geometry) -> None:
    """Weight gradient of each row of a batch, (N, *weight), the rows as groups."""
    out.copy_(_grouped(delta, x, out.shape[1:], geometry))


def _grouped(
    delta: Tensor, x: Tensor, shape: Sequence[int], geometry: Geometry
) -> Tensor:
    """The same as a tensor of its own."""
    num = x.shape[0]
    joined_delta = delta.reshape(1, -1, *delta.shape[2:])
    joined_x = x.reshape(1, -1, *x.shape[2:])
    # Only the shape of the weight is read.
    weight = delta.new_empty((num * shape[0], *shape[1:]))
    masks = [False, True, False]
    grads = geometry.backward(joined_delta, joined_x, weight, masks, num)[1]
    return grads.view(num, *shape)


def _write_unfolded(out: Tensor, delta: Tensor, x: Tensor, geometry: Geometry) -> None:
    """The same as one product with the windows of x, (N, in·kernel, places)."""
    pads = [p for padding in reversed(geometry.padding) for p in (padding, padding)]
    x = F.pad(x, pads) if any(pads) else x.contiguous()
    kernel, places = out.shape[3:], delta.shape[2:]
    steps = x.stride()[2:]
    taps = tuple(s * d for s, d in zip(steps, geometry.dilation, strict=True))
    jumps = tuple(s * j for s, j in zip(steps, geometry.stride, strict=True))
    windows = x.as_strided(
        (*x.shape[:2], *kernel, *places), (*x.stride()[:2], *taps, *jumps)
    )
    columns = windows.reshape(x.shape[0], -1, places.numel())
    product(delta.flatten(2), columns.mT, out.flatten(2))
