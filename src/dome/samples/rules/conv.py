"""Convolutions: the weight gradient of every sample in one grouped convolution.

The samples become groups of one big image: x as (1, N·in, ...) against δ as
(1, N·out, ...) with N times the groups. With very few channels a group such kernels
are slow, and one batched product with the unfolded input (im2col) is used instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from torch.autograd import Function

from dome.samples.axis import Axis
from dome.samples.rules.site import Site
from dome.samples.sink import apply, first_order
from dome.samples.trace import Call, Trace

# Measured on CPU at 3x32x32: grouped 2.2 ms, unfolded 0.26 ms; even at 16 channels.
_FEW_CHANNELS = 8

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

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution as the user called it, so that autocast knows it."""
        place = len(self.stride) - 1
        if self.transposed:
            function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[
                place
            ]
            extra = (self.output_padding, self.groups, self.dilation)
            return function(x, weight, bias, self.stride, self.padding, *extra)
        plain = (F.conv1d, F.conv2d, F.conv3d)[place]
        extra_plain = (self.dilation, self.groups)
        return plain(x, weight, bias, self.stride, self.padding, *extra_plain)

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
    _: Call,
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
    return _captured(trace, axis, input, weight, bias, geometry)


def conv_transpose(
    trace: Trace,
    _: Call,
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
    sizes = (_each(s, rank) for s in (stride, padding, dilation))
    geometry = Geometry(*sizes, True, _each(output_padding, rank), groups)
    return _captured(trace, axis, input, weight, bias, geometry)


def _captured(
    trace: Trace,
    axis: Axis,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    site = Site(axis, trace.sink(weight), trace.sink(bias))
    out: Tensor = apply(_Conv, x, weight, bias, site, geometry)
    trace.mark_axis(out, axis)
    return out


def _axis(trace: Trace, x: Tensor, weight: Tensor, bias: Tensor | None) -> Axis:
    axis = trace.axis(x)
    if axis is None or axis.dim != 0 or x.ndim != weight.ndim:
        raise trace.lost(f"a convolution of {tuple(x.shape)}", weight, bias)
    return axis


def _each(size: Any, rank: int) -> tuple[int, ...]:  # noqa: ANN401 (an int or a sequence)
    return (
        (size,) * rank if isinstance(size, int) else tuple(size) * (rank // len(size))
    )


class _Conv(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: Site,
        geometry: Geometry,
    ) -> Tensor:
        out = geometry.run(x, weight, bias)
        # Under autocast the convolution ran in the type of the result.
        ctx.save_for_backward(x.to(out.dtype), weight.to(out.dtype))
        ctx.site, ctx.geometry = site, geometry
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        site: Site = ctx.site
        geometry: Geometry = ctx.geometry
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = geometry.backward(delta, x, weight, [True, False, False])[0]
        if ctx.needs_input_grad[1] and site.wants_weight():
            rows = _weight_rows(delta, x, weight, geometry)
            dw = site.weight_total(site.axis.fold(rows))
        if ctx.needs_input_grad[2] and site.wants_bias():
            db = site.bias_total(site.axis.fold(delta.flatten(2).sum(2)))
        return dx, dw, db, None, None


def _weight_rows(
    delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
) -> Tensor:
    """Weight gradient of each row of a batch, shape (N, *weight)."""
    num = len(x)
    few = x.shape[1] // geometry.groups < _FEW_CHANNELS
    if few and geometry.groups == 1 and not geometry.transposed:
        return _unfolded_rows(delta, x, weight, geometry)
    # Only the shape of the weight is read.
    shape = (num * weight.shape[0], *weight.shape[1:])
    joined = (t.reshape(1, -1, *t.shape[2:]) for t in (delta, x))
    masks = [False, True, False]
    rows = geometry.backward(*joined, weight.new_empty(shape), masks, num)[1]
    return rows.view(num, *weight.shape)


def _unfolded_rows(
    delta: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
) -> Tensor:
    """The same as one batched product with every window of x, (N, in·kernel, places)."""
    pads = [p for padding in reversed(geometry.padding) for p in (padding, padding)]
    x = F.pad(x, pads) if any(pads) else x.contiguous()
    kernel, places = weight.shape[2:], delta.shape[2:]
    steps = x.stride()[2:]
    taps = tuple(s * d for s, d in zip(steps, geometry.dilation, strict=True))
    jumps = tuple(s * j for s, j in zip(steps, geometry.stride, strict=True))
    windows = x.as_strided(
        (*x.shape[:2], *kernel, *places), (*x.stride()[:2], *taps, *jumps)
    )
    columns = windows.reshape(len(x), -1, places.numel())
    return torch.bmm(delta.flatten(2), columns.mT).view(len(x), *weight.shape)
