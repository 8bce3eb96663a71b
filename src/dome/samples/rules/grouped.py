"""Grouped products: rows sorted by expert, each group times its expert's matrix.

G[b, e] = Σ a[n]ᵀ δ[n] over the rows n of sample b that went to expert e.
Shapes: N rows, E experts.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.product import product
from dome.samples.store.sink import Site
from dome.samples.tracing.axis import NOBODY, Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.refuse import settled
from dome.samples.tracing.trace import Trace


def grouped_mm(
    trace: Trace,
    call: Call,
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Value,
) -> Tensor:
    """``F.grouped_mm`` of rows (N, in) and matrices (E, in, out)."""
    place = settled(trace, trace.place(mat_a), 1, mat_b, bias)
    rows = mat_a.ndim == 2 and mat_b.ndim == 3
    plain = bias is None and all(value is None for value in options.values())
    if place is None or not rows or offs is None or not plain:
        raise trace.lost(f"a grouped product of {tuple(mat_a.shape)}", mat_b, bias)
    site = Site(place, trace.sink(mat_b), None)
    out: Tensor = apply(_Grouped, mat_a, mat_b, offs, site, call)
    trace.mark_axis(out, place)
    return out


class _Grouped(Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        site: Site,
        call: Call,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.site, ctx.func = site, call.func
        return call.run()

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = ctx.saved_tensors
        site: Site = ctx.site
        dx = dw = None
        delta = delta.contiguous()
        if ctx.needs_input_grad[0]:
            dx = ctx.func(delta, weight.mT, offs=offs)
        if ctx.needs_input_grad[1] and site.wants_weight():
            pairs = _pairs(site, x, offs, len(weight))
            a, d = pairs.samples_first(x), pairs.samples_first(delta)
            grads = product(a.mT, d, None).view(-1, *weight.shape)
            dw = site.weight_total(grads)
        return dx, dw, None, None, None


def _pairs(site: Site, x: Tensor, offs: Tensor, num: int) -> Labels:
    """The number b·E + e of every row of x (N, in), as if each pair were a sample."""
    place = site.axis.labels(x)
    rows = torch.arange(len(x), device=x.device, dtype=offs.dtype)
    expert = torch.searchsorted(offs, rows, right=True)
    ids = place.ids.reshape(-1)
    pair = torch.where(expert < num, ids * num + expert, NOBODY)
    return Labels(torch.where(ids < 0, NOBODY, pair)[:, None], place.batch * num)
