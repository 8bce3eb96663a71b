"""A weight spread over rows whose samples are known by number.

As ``broadcast`` spreads it over samples in a regular layout: every row gets the weight
as a view, and the gradient of that view is summed by id. Shapes: B samples, N rows.
"""

from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply, first_order
from dome.samples.store.sink import Sink
from dome.samples.tracing.axis import sum_by_id
from dome.samples.tracing.trace import Trace


def spread_by_number(trace: Trace, t: Tensor, ids: Tensor) -> Tensor:
    """A weight with its own copy for every row, as a view.

    Args:
        trace: Knows where the weight comes from.
        t: The weight; it broadcasts against what the ids are of.
        ids: The sample of every entry, of size 1 where it does not change.
    """
    sink = trace.sink(t)
    if sink is None:
        return t
    ndim = max(t.ndim, ids.ndim)
    ids = ids.view((1,) * (ndim - ids.ndim) + ids.shape)
    return apply(_SpreadByIds, t, sink, ids, trace.batch)


class _SpreadByIds(Function):
    @staticmethod
    def forward(ctx: Context, t: Tensor, sink: Sink, ids: Tensor, batch: int) -> Tensor:
        ctx.sink, ctx.ids, ctx.batch, ctx.shape = sink, ids, batch, t.shape
        wide = t.view((1,) * (ids.ndim - t.ndim) + t.shape)
        sizes = zip(wide.shape, ids.shape, strict=True)
        return wide.expand([max(own, rows) for own, rows in sizes])

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.sink.wanted():
            return None, None, None, None
        ids, batch, shape = ctx.ids, ctx.batch, ctx.shape
        wide = (*(1,) * (ids.ndim - len(shape)), *shape)
        dims = [d for d, size in enumerate(ids.shape) if size > 1]
        held = [d for d in dims if wide[d] > 1]
        front = delta.movedim(dims, list(range(len(dims))))
        rows = front.flatten(0, len(dims) - 1) if dims else front[None]
        own = ids.reshape(-1)
        if held:
            grads = _embedded(rows, own, batch).unflatten(1, front.shape[: len(dims)])
            summed = [dims.index(d) + 1 for d in dims if d not in held]
            grads = grads.sum(summed, keepdim=True) if summed else grads
            grads = grads.movedim(list(range(1, len(dims) + 1)), [d + 1 for d in dims])
        else:
            grads = sum_by_id(rows, own, batch)
        grads = grads.reshape(batch, *shape)
        ctx.sink.put(grads)
        return grads.sum(0), None, None, None


def _embedded(rows: Tensor, ids: Tensor, batch: int) -> Tensor:
    """Rows (N, ...) of a weight that holds one for each as (B, N, ...) with zeros."""
    num = len(rows)
    grads = rows.new_zeros(batch * num, *rows.shape[1:])
    places = ids.clamp(min=0) * num + ids.new_ones(num).cumsum(0) - 1
    return grads.index_copy_(0, places, rows).unflatten(0, (batch, num))
