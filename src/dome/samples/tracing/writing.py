"""How ids follow what is written into a tensor: assigned, scattered or added."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.flow import assigned_axis, indexed_axis
from dome.samples.tracing.labels import NOBODY, Labels, either, merged
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Place
from dome.samples.tracing.step import Step, operations

_ASSIGNS = frozenset((torch.Tensor.__setitem__, *operations("index_put", "index_put_")))
_BY_ROW = frozenset(
    (
        *operations("index_add", "index_add_", "index_copy", "index_copy_"),
        *operations("index_reduce", "index_reduce_"),
    )
)
_BY_ENTRY = frozenset(
    (
        *operations("scatter", "scatter_", "scatter_add", "scatter_add_"),
        *operations("scatter_reduce", "scatter_reduce_"),
    )
)
_BY_MASK = frozenset(operations("masked_scatter", "masked_scatter_"))
WRITES = _ASSIGNS | _BY_ROW | _BY_ENTRY | _BY_MASK
# What was there before is gone: its sample does not matter.
_REPLACING = frozenset(
    (
        *operations("index_copy", "index_copy_", "scatter", "scatter_"),
        *(*_ASSIGNS, *_BY_MASK),
    )
)


def written(step: Step) -> tuple[Place | None, Tensor | None]:
    """Where the tensor that was written to holds samples, and whether they have met."""
    x, value = step.args[0], _value(step)
    place = step.place(x)
    source = step.ids(value) if isinstance(value, Tensor) else None
    if source is None:
        return place, None
    plain = _plain if step.func in _ASSIGNS else _row_by_row
    axis = plain(step, x, value)
    if axis is not None:
        return axis, None
    own = step.ids(x)
    if own is None:
        own = torch.full((1,) * x.ndim, NOBODY, device=x.device)
    spot = _SPOTS[step.func](step, x, own, value, source)
    clash = merged(spot.before, spot.source)[1]
    if isinstance(place, Axis):
        return place, clash
    after = torch.where(spot.source < 0, spot.before, spot.source)
    ids = spot.write(after)
    several = merged(spot.read(ids), spot.source)[1]
    doubt = several if step.func in _REPLACING else either(clash, several)
    return Labels(_filled(step, ids), step.known[0][1].batch), doubt


def written_through(
    t: Tensor, place: Place, base: Tensor, held: Place | None
) -> tuple[Place | None, str | None, str | None, Tensor | None]:
    """What is known of a tensor after a view of it was written to.

    Args:
        t: The view.
        place: Where it holds samples now.
        base: What it is a view of.
        held: Where that held samples before; None if it held none.
    """
    start = int(base.storage_offset())
    extent = 1 + sum(
        (n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True)
    )
    ids = torch.full((extent,), NOBODY, device=base.device)
    whole = ids.as_strided(base.shape, base.stride(), 0)
    if held is not None:
        whole.copy_(held.ids if isinstance(held, Labels) else held.labels(base).ids)
    part = ids.as_strided(t.shape, t.stride(), int(t.storage_offset()) - start)
    own = place.ids if isinstance(place, Labels) else place.labels(t).ids
    if held is not None:
        return held, None, None, ((part != own) & (part >= 0)).any()
    part.copy_(own)
    axis, doubt = _regular(base, place, whole)
    return axis or Labels(whole, place.batch), None, None, doubt


def _regular(
    base: Tensor, place: Place, ids: Tensor
) -> tuple[Axis | None, Tensor | None]:
    """The dimension along which these ids count the samples; whether it is not."""
    dims = [dim for dim, size in enumerate(base.shape) if size == place.batch]
    for dim in dims:
        axis = Axis(dim, place.batch)
        doubt = ((ids != axis.labels(base).ids) & (ids >= 0)).any()
        # Elsewhere than on the CPU an answer waits for all work before it.
        if not ids.is_cpu and len(dims) == 1:
            return axis, doubt
        if ids.is_cpu and not doubt:
            return axis, None
    return None, None


def _value(step: Step) -> Value:
    if step.func in _ASSIGNS or step.func in _BY_MASK:
        return step.argument(2, "values", "source")
    return step.argument(3, "source", "src", "value")


def _plain(step: Step, x: Tensor, value: Tensor) -> Axis | None:
    """The layout that shapes alone tell, if the index leaves the samples alone."""
    index, axis, own = step.args[1], step.axes(value), step.axes(x)
    if axis is None or isinstance(step.place(x), Labels):
        return None
    index = tuple(index) if isinstance(index, list) else index
    if own is None:
        return assigned_axis(x, index, value, axis)
    inside = indexed_axis(x, index, own)
    spot = x[index].ndim - value.ndim + axis.dim
    same = inside is not None and (inside.dim, inside.inner) == (spot, axis.inner)
    return own if same else None


def _row_by_row(step: Step, x: Tensor, value: Tensor) -> Axis | None:
    """The layout of what is scattered along another dimension into a constant."""
    axis = step.axes(value)
    if axis is None or step.place(x) is not None or step.func in _BY_MASK:
        return None
    elsewhere = step.argument(1, "dim") % x.ndim != axis.dim
    return axis if elsewhere and x.shape[axis.dim] == value.shape[axis.dim] else None


def _filled(step: Step, ids: Tensor) -> Tensor:
    """Rows that nothing was written to, as the rows of a tensor of this length are."""
    rows = ids.shape[0] if ids.ndim else 0
    space = step.spaces.get(rows)
    if rows == step.known[0][1].batch:
        space = torch.arange(rows, device=ids.device)
    if space is None or ids.numel() != rows:
        return ids
    space = space.view(ids.shape)
    agrees = ((ids == space) | (ids < 0)).all()
    return torch.where(agrees, space, ids)


@dataclass(frozen=True, slots=True)
class _Spot:
    """The ids at the entries that are written to.

    Attributes:
        before: Those that were there.
        source: Those of what is written.
        read: Looks up the entries in any ids of the whole.
        write: The ids of the whole with these at the entries.
    """

    before: Tensor
    source: Tensor
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


def _assigned(step: Step, x: Tensor, own: Tensor, _: Tensor, source: Tensor) -> _Spot:
    index = tuple(step.args[1]) if isinstance(step.args[1], list) else step.args[1]
    given = index if isinstance(index, tuple) else (index,)
    simple = all(i is not None and i is not ... for i in given)
    taken = sum(
        i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in given
    )
    # Dimensions behind the index of which one entry stands for all.
    keep = 0
    if simple:
        while keep < min(x.ndim - taken, source.ndim) and source.shape[-1 - keep] == 1:
            keep += 1
    sizes = [*x.shape[: x.ndim - keep], *own.shape[x.ndim - keep :]]
    whole = own.expand(sizes)
    before = whole[index]

    def write(ids: Tensor) -> Tensor:
        copy = whole.clone()
        copy[index] = ids
        return copy

    return _Spot(before, source.expand_as(before), lambda ids: ids[index], write)


def _by_row(step: Step, x: Tensor, own: Tensor, _: Tensor, source: Tensor) -> _Spot:
    dim, index = step.argument(1, "dim") % x.ndim, step.argument(2, "index")
    index = index.reshape(-1)
    wide = [max(a, b) for a, b in zip(own.shape, source.shape, strict=True)]
    wide[dim] = x.shape[dim]
    whole = own.expand(wide)
    before = whole.index_select(dim, index)
    return _Spot(
        before,
        source.expand(before.shape),
        lambda ids: ids.index_select(dim, index),
        lambda ids: whole.index_copy(dim, index, ids),
    )


def _by_entry(step: Step, x: Tensor, own: Tensor, _: Tensor, source: Tensor) -> _Spot:
    dim, index = step.argument(1, "dim") % x.ndim, step.argument(2, "index")
    for d in range(x.ndim):
        constant = own.shape[d] == source.shape[d] == 1
        if d != dim and constant and (index.stride(d) == 0 or index.shape[d] == 1):
            index = index.narrow(d, 0, 1)
    one = [index.shape[d] == 1 and d != dim for d in range(x.ndim)]
    wide = [1 if cut else n for cut, n in zip(one, x.shape, strict=True)]
    whole = own.expand([max(a, b) for a, b in zip(own.shape, wide, strict=True)])
    ids = source.expand(list(map(max, source.shape, index.shape)))
    ids = ids[tuple(slice(n) for n in index.shape)]
    return _Spot(
        whole.gather(dim, index),
        ids,
        lambda found: found.gather(dim, index),
        lambda after: whole.scatter(dim, index, after),
    )


def _by_mask(
    step: Step, x: Tensor, own: Tensor, value: Tensor, source: Tensor
) -> _Spot:
    mask = step.argument(1, "mask").expand(x.shape)
    whole = own.expand(x.shape)
    taken = source.expand(value.shape).reshape(-1)
    ids = torch.full_like(whole, NOBODY).masked_scatter(mask, taken)
    return _Spot(whole, ids, lambda found: found, lambda after: after)


_SPOTS: dict[Callable[..., Value], Callable[..., _Spot]] = {
    **dict.fromkeys(_ASSIGNS, _assigned),
    **dict.fromkeys(_BY_ROW, _by_row),
    **dict.fromkeys(_BY_ENTRY, _by_entry),
    **dict.fromkeys(_BY_MASK, _by_mask),
}
