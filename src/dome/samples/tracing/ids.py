"""Samples by number: how the ids of entries follow an operation, on the device.

Entries that come together (sums, products, pairs) may have two ids. That is a doubt: a
boolean that stays on the device until a parameter meets the entry. What picks, places
or writes entries is done to their ids too. The table ``_RULES`` names the rule of each
operation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.samples.tracing.axis import (
    NOBODY,
    Axis,
    Labels,
    assigned_axis,
    collapsed,
    compact,
    either,
    indexed_axis,
    merged,
    reshaped,
)
from dome.samples.tracing.mixing import acts_along
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import (
    ALONG,
    BROADCASTING,
    ROLLING,
    SELECTING,
    SIZED,
    SORTING,
    SPLITTING,
    Place,
    Step,
    einsum_operands,
    einsum_words,
    operations,
)
from dome.torch_private import fused

Found = tuple[Tensor | None, Tensor | None]  # ids and doubt


def met(step: Step) -> Found:
    """Entries of all arguments, lined up from the right, then brought together."""
    ndim = max(t.ndim for t, _ in step.known)
    # A constant may have the most dimensions.
    ndim = step.out.ndim if step.func in BROADCASTING else ndim
    ids, doubt = None, None
    for t, _ in step.known:
        own = step.ids(t)
        if own is None:
            continue
        own = own.view((1,) * (ndim - own.ndim) + own.shape)
        if ids is None or ids is own:
            ids = own
        elif _broadcast(ids, own):
            ids, clash = merged(ids, own)
            doubt = either(doubt, clash)
        else:
            return None, doubt
    if ids is None:
        return None, None
    dims = acts_along(step.func, step.args, step.kwargs, step.x)
    if step.x.ndim != ndim:
        dims = tuple(d + ndim - step.x.ndim for d in dims)
    ids, several = collapsed(ids, dims)
    if step.out.ndim == ids.ndim - len(dims):
        ids = ids.reshape([n for d, n in enumerate(ids.shape) if d not in dims])
    return ids, either(doubt, several)


def _broadcast(a: Tensor, b: Tensor) -> bool:
    pairs = zip(a.shape, b.shape, strict=True)
    return all(1 in pair or pair[0] == pair[1] for pair in pairs)


def multiplied(step: Step) -> Found:
    """``matmul``: rows of the first meet columns of the second."""
    a, b = step.args[:2]
    if min(a.ndim, b.ndim) < 2:
        return None, None
    found = []
    doubt = None
    for t, dim in ((a, -1), (b, -2)):
        ids = step.ids(t)
        if ids is not None:
            ids, several = collapsed(ids, (dim % t.ndim,))
            doubt = either(doubt, several)
            found.append(ids.view((1,) * (step.out.ndim - ids.ndim) + ids.shape))
    if len(found) == 1:
        return found[0], doubt
    ids, clash = merged(*found)
    return ids, either(doubt, clash)


def contracted(step: Step) -> Found:
    """``einsum``: entries that are summed over must be one sample's."""
    words = einsum_words(step.args)
    if words is None:
        return None, None
    *inputs, output = words
    found, doubt = None, None
    for word, t in zip(inputs, einsum_operands(step.args), strict=True):
        ids = step.ids(t)
        if ids is None or len(set(word)) < len(word):
            continue
        summed = tuple(d for d, letter in enumerate(word) if letter not in output)
        ids, several = collapsed(ids, summed)
        kept = [letter for letter in output if letter in word]
        order = [*(word.index(letter) for letter in kept), *summed]
        ids = ids.permute(order).reshape([ids.shape[word.index(k)] for k in kept])
        ids = ids.view([ids.shape[kept.index(k)] if k in kept else 1 for k in output])
        clash: Tensor | None = None
        if found is not None:
            ids, clash = merged(found, ids)
        found, doubt = ids, either(doubt, several, clash)
    return found, doubt


def viewed(step: Step) -> Found:
    """Views: of the ids as of the tensor."""
    ids = _own(step)
    if ids is None:
        return None, None
    plain = {k: v for k, v in step.kwargs.items() if k != "dtype"}
    result = step.func(ids, *step.args[1:], **plain)
    return compact(tensors(result)[step.number]), None


def reshaped_ids(step: Step) -> Found:
    """Reshapes, of which a few numbers stand for all."""
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return None, None
    return reshaped(ids, tuple(x.shape), tuple(step.out.shape)), None


def selected(step: Step) -> Found:
    """Flips, rolls and selections along one dimension."""
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return _from_the_index(step)
    if step.func in SORTING:
        return _sorted(step, ids)
    if step.func in SELECTING:
        dim = step.argument(1, "dim")
        if ids.shape[dim % x.ndim] == 1:
            return ids, None
        return ids.index_select(dim, step.argument(2, "index")), None
    return compact(step.func(ids.expand(x.shape), *step.args[1:], **step.kwargs)), None


def _sorted(step: Step, ids: Tensor) -> Found:
    x = step.args[0]
    (dim,) = acts_along(step.func, step.args, step.kwargs, x) or (x.ndim - 1,)
    order = step.result if isinstance(step.result, Tensor) else step.result[1]
    if ids.shape[dim] == 1:
        return ids, None
    return ids.expand(x.shape).gather(dim, order), None


def gathered(step: Step) -> Found:
    """``gather`` and ``take_along_dim``."""
    x, dim, index = step.args[0], step.argument(1, "dim"), step.argument(2, "index")
    if step.func in ALONG:
        index, dim = step.argument(1, "indices"), step.argument(2, "dim")
    ids = step.ids(x)
    if ids is None or dim is None:
        return _from_the_index(step)
    dim %= x.ndim
    if ids.shape[dim] == 1:
        return _narrowed(ids, index), None
    # Where neither ids nor index change, one entry stands for all.
    for d in range(x.ndim):
        if d != dim and ids.shape[d] == 1 and index.stride(d) == 0:
            index = index.narrow(d, 0, 1)
    sizes = list(map(max, ids.shape, index.shape))
    sizes[dim] = x.shape[dim]
    return ids.expand(sizes).gather(dim, index), None


def _narrowed(ids: Tensor, index: Tensor) -> Tensor:
    for d, size in enumerate(index.shape):
        if ids.shape[d] > size:
            ids = ids.narrow(d, 0, size)
    return ids


def indexed(step: Step) -> Found:
    """``x[index]``."""
    x, index = step.args[0], step.args[1]
    ids = step.ids(x)
    if ids is None:
        return _from_the_index(step)
    index = _spelled_out(index if isinstance(index, tuple) else (index,), x.ndim)
    own, dim = [], 0
    for i in index:
        width = 0 if i is None else i.ndim if _is_mask(i) else 1
        if _is_mask(i) or isinstance(i, list):
            sizes = list(ids.shape)
            sizes[dim : dim + width] = x.shape[dim : dim + width]
            ids = ids.expand(sizes)
            own.append(i)
        elif width and ids.shape[dim] == 1:
            own.append(_of_one(i))
        else:
            own.append(i)
        dim += width
    return ids[tuple(own)], None


def _spelled_out(index: tuple[Value, ...], ndim: int) -> tuple[Value, ...]:
    """An index with a slice for every dimension that it leaves alone."""
    taken = sum(
        i.ndim if _is_mask(i) else 1 for i in index if i is not None and i is not ...
    )
    rest = (slice(None),) * (ndim - taken)
    for place, i in enumerate(index):
        if i is ...:
            return index[:place] + rest + index[place + 1 :]
    return index + rest


def _is_mask(i: Value) -> bool:
    return isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)


def _of_one(i: Value) -> Value:
    """An index into a dimension of which one entry stands for all."""
    if isinstance(i, slice):
        return slice(None)
    return torch.zeros_like(i) if isinstance(i, Tensor) else 0


def masked(step: Step) -> Found:
    """``masked_select``: entries one after the other."""
    ids = _own(step)
    if ids is None:
        return None, None
    ids, mask = torch.broadcast_tensors(ids, step.argument(1, "mask"))
    return ids[mask], None


def _from_the_index(step: Step) -> Found:
    """A table that is no sample's, looked up at the samples' indices."""
    index = step.args[1] if step.func is torch.Tensor.__getitem__ else None
    if step.func in SELECTING and step.argument(1, "dim") == 0:
        index = step.argument(2, "index")
    ids = step.ids(index)
    if ids is None or _is_mask(index):
        return None, None
    return ids.view(ids.shape + (1,) * (step.out.ndim - ids.ndim)), None


def looked_up(step: Step) -> Found:
    """Rows of a table, and one-hot vectors."""
    ids = step.ids(step.argument(0, "input"))
    return (None if ids is None else ids.unsqueeze(-1)), None


def repeated(step: Step) -> Found:
    """``repeat_interleave``."""
    x, dim = step.args[0], step.argument(2, "dim")
    ids = step.ids(x)
    if ids is None or dim is None:
        return None, None
    if ids.shape[dim % x.ndim] == 1:
        return ids, None
    repeats, total = step.argument(1, "repeats"), step.out.shape[dim]
    return ids.repeat_interleave(repeats, dim, output_size=total), None


def joined(step: Step) -> Found:
    """``cat`` along the samples, or of parts that all hold them elsewhere."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim", "axis") or 0
    dim %= step.out.ndim
    own = [step.ids(t) for t in parts]
    flat = all(ids is None or ids.shape[dim] == 1 for ids in own)
    if flat and not _are_alone([ids for ids in own if ids is not None]):
        return met(step)
    pieces = []
    for t, ids in zip(parts, own, strict=True):
        piece = _nobody(t) if ids is None else ids
        sizes = [t.shape[d] if d == dim else n for d, n in enumerate(piece.shape)]
        pieces.append(piece.expand(sizes))
    return _concatenated(pieces, dim), None


def _are_alone(ids: list[Tensor]) -> bool:
    """Whether parts are one sample's each, and of several as far as one can see."""
    if any(one.numel() > 1 for one in ids):
        return False
    return any(one.device.type != "cpu" or int(one) != int(ids[0]) for one in ids)


def stacked(step: Step) -> Found:
    """``stack``: parts side by side in a dimension of their own."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim") or 0
    dim %= step.out.ndim
    own = [step.ids(t) for t in parts]
    pieces = [
        (_nobody(t) if ids is None else ids).unsqueeze(dim)
        for t, ids in zip(parts, own, strict=True)
    ]
    return _concatenated(pieces, dim), None


def _nobody(t: Tensor) -> Tensor:
    return torch.full((1,) * t.ndim, NOBODY, device=t.device)


def _concatenated(pieces: list[Tensor], dim: int) -> Tensor:
    """Ids side by side along a dimension, along the others as large as the largest."""
    sizes = [max(p.shape[d] for p in pieces) for d in range(pieces[0].ndim)]
    wide = []
    for piece in pieces:
        sizes[dim] = piece.shape[dim]
        wide.append(piece.expand(sizes))
    return torch.cat(wide, dim)


def packed(step: Step) -> Found:
    """Rows of a packed sequence; of the lengths that come with it, nothing."""
    if step.number:
        return None, None
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return None, None
    wide = ids.expand(*x.shape[:2], *ids.shape[2:]).contiguous()
    data, _ = step.func(wide, *step.args[1:], **step.kwargs)
    return data, None


def unpacked(step: Step) -> Found:
    """A padded batch: what pads a sample is the sample's."""
    data, sizes = step.args[:2]
    ids = step.ids(data)
    if ids is None or step.number:
        return None, None
    first = ids[: int(sizes[0])]
    batch_first = step.argument(2, "batch_first")
    return (first.unsqueeze(1) if batch_first else first.unsqueeze(0)), None


def _own(step: Step) -> Tensor | None:
    """The ids of the first argument, of its own shape without a copy."""
    x = step.args[0]
    ids = step.ids(x)
    return None if ids is None else ids.expand(x.shape)


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


def has_rule(func: Callable[..., Value]) -> bool:
    """Whether ids have an exact rule of their own for this operation."""
    return func in WRITES or (func in _RULES and func not in _PRODUCTS)


def by_ids(step: Step) -> tuple[Place | None, Tensor | None]:
    """Where a result holds its samples, and whether entries of several have met."""
    batch = step.known[0][1].batch
    if step.func in WRITES:
        return written(step)
    ids, doubt = _RULES.get(step.func, met)(step)
    if ids is None or not _fits(ids, step.out):
        return None, doubt
    axis = _regular_partner(step)
    if axis is not None:
        return axis, doubt
    return Labels(ids, batch), doubt


def _fits(ids: Tensor, out: Tensor) -> bool:
    return ids.ndim == out.ndim and all(
        size in (1, full) for size, full in zip(ids.shape, out.shape, strict=True)
    )


def _regular_partner(step: Step) -> Axis | None:
    """The layout of a regular argument of the result's shape: it holds for the rest."""
    words = einsum_words(step.args) if step.func is torch.einsum else None
    if words is not None:
        *inputs, output = words
        for word, t in zip(inputs, einsum_operands(step.args), strict=True):
            axis = step.axes(t)
            if axis is not None and word[axis.dim] in output:
                return axis.moved(output.index(word[axis.dim]))
    if step.func in _RULES:
        return None
    for t, place in step.known:
        if isinstance(place, Axis) and t.shape == step.out.shape:
            return place
    return None


_PRODUCTS = frozenset(
    (*operations("matmul", "mm", "bmm", "__matmul__"), torch.sparse.mm)
)
_VIEWS = (
    *operations("transpose", "permute", "t", "adjoint", "movedim", "moveaxis"),
    *operations("swapaxes", "swapdims", "unsqueeze", "squeeze", "expand"),
    *operations("broadcast_to", "select", "narrow", "diagonal", "unfold", "unbind"),
    *(getattr(torch.Tensor, n).__get__ for n in ("T", "mT", "H", "mH")),
    *SIZED,
    *SPLITTING,
)
_RULES: dict[Callable[..., Value], Callable[[Step], Found]] = {
    **dict.fromkeys(_VIEWS, viewed),
    **dict.fromkeys(
        operations("view", "reshape", "flatten", "unflatten"), reshaped_ids
    ),
    **dict.fromkeys(operations("ravel", "view_as", "reshape_as"), reshaped_ids),
    **dict.fromkeys(operations("flip", "fliplr", "flipud"), selected),
    **dict.fromkeys((*ROLLING, *SORTING, *SELECTING), selected),
    **dict.fromkeys((*operations("gather"), *ALONG), gathered),
    **dict.fromkeys(operations("repeat_interleave"), repeated),
    **dict.fromkeys(operations("cat", "concat", "concatenate"), joined),
    **dict.fromkeys(operations("stack"), stacked),
    **dict.fromkeys(operations("embedding", "one_hot"), looked_up),
    **dict.fromkeys(_PRODUCTS, multiplied),
    **dict.fromkeys(operations("masked_select"), masked),
    torch.einsum: contracted,
    torch.Tensor.__getitem__: indexed,
    fused._pack_padded_sequence: packed,
    fused._pad_packed_sequence: unpacked,
}
