"""How the ids of samples follow an operation: through the same indexing, on the device.

Two ids for one entry are a doubt, a boolean that stays on the device until a parameter
meets the entry.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.dims import acts_along
from dome.samples.tracing.flow import einsum_operands, einsum_words, indexed_axis
from dome.samples.tracing.labels import (
    NOBODY,
    Labels,
    collapsed,
    compact,
    either,
    merged,
    reshaped,
)
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import Place
from dome.samples.tracing.step import Step, operations
from dome.samples.tracing.writing import WRITES, written
from dome.torch_private import fused

Found = tuple[Tensor | None, Tensor | None]  # ids and doubt


def has_rule(func: Callable[..., Value]) -> bool:
    """Whether ids have an exact rule of their own for this operation."""
    return func in WRITES or (func in _RULES and func not in _PRODUCTS)


def wants_ids(step: Step) -> bool:
    """Whether the samples of an operation must be followed by number."""
    if any(isinstance(place, Labels) for _, place in step.known):
        return True
    touches = _TOUCHES.get(step.func)
    return touches is not None and step.axis.batch > 1 and touches(step)


def by_ids(step: Step) -> tuple[Place | None, Tensor | None]:
    """Where a result holds its samples, and whether entries of several have met."""
    batch = step.known[0][1].batch
    if step.func in WRITES:
        return written(step)
    ids, doubt = _RULES.get(step.func, _met)(step)
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


def _met(step: Step) -> Found:
    """Entries of all arguments, lined up from the right, then brought together."""
    ndim = max(t.ndim for t, _ in step.known)
    ids, doubt = None, None
    for t, _ in step.known:
        own = step.ids(t)
        if own is None:
            continue
        own = own.view(*(1,) * (ndim - own.ndim), *own.shape)
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


def _multiplied(step: Step) -> Found:
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
            found.append(ids.view(*(1,) * (step.out.ndim - ids.ndim), *ids.shape))
    if len(found) == 1:
        return found[0], doubt
    ids, clash = merged(*found)
    return ids, either(doubt, clash)


def _contracted(step: Step) -> Found:
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


def _own(step: Step) -> Tensor | None:
    """The ids of the first argument, of its own shape without a copy."""
    x = step.args[0]
    ids = step.ids(x)
    return None if ids is None else ids.expand(x.shape)


def _viewed(step: Step) -> Found:
    """Views: of the ids as of the tensor."""
    ids = _own(step)
    if ids is None:
        return None, None
    plain = {k: v for k, v in step.kwargs.items() if k != "dtype"}
    result = step.func(ids, *step.args[1:], **plain)
    return compact(list(tensors(result))[step.number]), None


def _reshaped(step: Step) -> Found:
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return None, None
    return reshaped(ids, tuple(x.shape), tuple(step.out.shape)), None


def _selected(step: Step) -> Found:
    """Flips, rolls and selections along one dimension."""
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return _from_the_index(step)
    if step.func in _SORTING:
        return _sorted(step, ids)
    if step.func in _SELECTING:
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


def _gathered(step: Step) -> Found:
    x, dim, index = step.args[0], step.argument(1, "dim"), step.argument(2, "index")
    if step.func in _ALONG:
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


def _indexed(step: Step) -> Found:
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


def _masked(step: Step) -> Found:
    """``masked_select``: entries one after the other."""
    ids = _own(step)
    if ids is None:
        return None, None
    ids, mask = torch.broadcast_tensors(ids, step.argument(1, "mask"))
    return ids[mask], None


def _from_the_index(step: Step) -> Found:
    """A table that is no sample's, looked up at the samples' indices."""
    index = step.args[1] if step.func is torch.Tensor.__getitem__ else None
    if step.func in _SELECTING and step.argument(1, "dim") == 0:
        index = step.argument(2, "index")
    ids = step.ids(index)
    if ids is None or _is_mask(index):
        return None, None
    return ids.view(*ids.shape, *(1,) * (step.out.ndim - ids.ndim)), None


def _looked_up(step: Step) -> Found:
    ids = step.ids(step.argument(0, "input"))
    return (None if ids is None else ids.unsqueeze(-1)), None


def _repeated(step: Step) -> Found:
    """``repeat_interleave``."""
    x, dim = step.args[0], step.argument(2, "dim")
    ids = step.ids(x)
    if ids is None or dim is None:
        return None, None
    if ids.shape[dim % x.ndim] == 1:
        return ids, None
    repeats, total = step.argument(1, "repeats"), step.out.shape[dim]
    return ids.repeat_interleave(repeats, dim, output_size=total), None


def _joined(step: Step) -> Found:
    """``cat`` along the samples, or of parts that all hold them elsewhere."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim", "axis") or 0
    dim %= step.out.ndim
    own = [step.ids(t) for t in parts]
    if all(ids is None or ids.shape[dim] == 1 for ids in own):
        return _met(step)
    pieces = []
    for t, ids in zip(parts, own, strict=True):
        if ids is None:
            nobody = torch.full((1,) * t.ndim, NOBODY, device=t.device)
        piece = nobody if ids is None else ids
        sizes = [t.shape[d] if d == dim else n for d, n in enumerate(piece.shape)]
        pieces.append(piece.expand(sizes))
    others = [max(p.shape[d] for p in pieces) for d in range(step.out.ndim)]
    wide = []
    for piece in pieces:
        others[dim] = piece.shape[dim]
        wide.append(piece.expand(others))
    return torch.cat(wide, dim), None


def _packed(step: Step) -> Found:
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


def _unpacked(step: Step) -> Found:
    """A padded batch: what pads a sample is the sample's."""
    data, sizes = step.args[:2]
    ids = step.ids(data)
    if ids is None or step.number:
        return None, None
    first = ids[: int(sizes[0])]
    batch_first = step.argument(2, "batch_first")
    return (first.unsqueeze(1) if batch_first else first.unsqueeze(0)), None


def _always(_: Step) -> bool:
    return True


def _touched(step: Step) -> bool:
    """Whether the first argument's samples lie along a dimension that is worked on."""
    axis = step.axes(step.args[0]) if isinstance(step.args[0], Tensor) else None
    if axis is None:
        return False
    place = 2 if step.func in _ROLLING | _ALONG else 1
    dims = step.argument(place, "dim", "dims")
    if step.func in _SORTING or (dims is None and step.func in _SPLITTING):
        return axis.dim in (acts_along(step.func, step.args, step.kwargs, step.x))
    if step.func in _SIZED:
        dims = step.argument(2, "dim") or 0
        block = axis.batch * axis.inner
        if all(t.shape[axis.dim] % block == 0 for t in tensors(step.result)):
            return False  # halves of a batch that was joined
    if dims is None:
        return True
    given = dims if isinstance(dims, tuple | list) else (dims,)
    return any(dim % step.args[0].ndim == axis.dim for dim in given)


def _uncounted(step: Step) -> bool:
    """Whether each entry is repeated as often as a tensor says."""
    return not isinstance(step.argument(1, "repeats"), int)


def _rearranged(step: Step) -> bool:
    """Whether an index picks samples, or is not one that shapes alone explain."""
    x, index = step.args[0], step.args[1]
    axis = step.axes(x)
    if axis is None:
        return step.place(index) is not None
    index = index if isinstance(index, tuple) else (index,)
    advanced = [i for i in index if isinstance(i, Tensor | list | int)]
    chosen = [i for i in advanced if not isinstance(i, int)]
    if len(advanced) > 1 and chosen:
        return True
    return indexed_axis(x, step.args[1], axis) is None


def _uneven(step: Step) -> bool:
    """Whether parts are joined along the samples that are not laid out alike."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim", "axis") or 0
    axes = [step.axes(t) for t in parts]
    along = any(
        a is not None and dim % t.ndim == a.dim
        for a, t in zip(axes, parts, strict=True)
    )
    return along and len(set(axes)) > 1


_ROLLING = frozenset(operations("roll"))
_SORTING = frozenset(operations("sort", "argsort", "topk", "msort"))
_SELECTING = frozenset(operations("index_select"))
_ALONG = frozenset(operations("take_along_dim"))
_SIZED = frozenset(operations("chunk", "split", "tensor_split", "split_with_sizes"))
_SPLITTING = frozenset(operations("unbind", "unsafe_chunk", "unsafe_split"))
_PRODUCTS = frozenset(
    (*operations("matmul", "mm", "bmm", "__matmul__"), torch.sparse.mm)
)
_VIEWS = (
    *operations("transpose", "permute", "t", "adjoint", "movedim", "moveaxis"),
    *operations("swapaxes", "swapdims", "unsqueeze", "squeeze", "expand"),
    *operations("broadcast_to", "select", "narrow", "diagonal", "unfold", "unbind"),
    *(getattr(torch.Tensor, n).__get__ for n in ("T", "mT", "H", "mH")),
    *_SIZED,
    *_SPLITTING,
)
_RULES: dict[Callable[..., Value], Callable[[Step], Found]] = {
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(operations("view", "reshape", "flatten", "unflatten"), _reshaped),
    **dict.fromkeys(operations("ravel", "view_as", "reshape_as"), _reshaped),
    **dict.fromkeys(operations("flip", "fliplr", "flipud"), _selected),
    **dict.fromkeys((*_ROLLING, *_SORTING, *_SELECTING), _selected),
    **dict.fromkeys((*operations("gather"), *_ALONG), _gathered),
    **dict.fromkeys(operations("repeat_interleave"), _repeated),
    **dict.fromkeys(operations("cat", "concat", "concatenate"), _joined),
    **dict.fromkeys(operations("embedding", "one_hot"), _looked_up),
    **dict.fromkeys(_PRODUCTS, _multiplied),
    **dict.fromkeys(operations("masked_select"), _masked),
    torch.einsum: _contracted,
    torch.Tensor.__getitem__: _indexed,
    fused._pack_padded_sequence: _packed,
    fused._pad_packed_sequence: _unpacked,
}
_TOUCHES: dict[Callable[..., Value], Callable[[Step], bool]] = {
    **dict.fromkeys(
        (*_ROLLING, *_SORTING, *_SELECTING, *_ALONG, *_SPLITTING), _touched
    ),
    **dict.fromkeys(operations("flip", "fliplr", "flipud", "gather"), _touched),
    **dict.fromkeys(operations("narrow", "select"), _touched),
    **dict.fromkeys(operations("repeat_interleave"), _uncounted),
    **dict.fromkeys(_SIZED, _touched),
    **dict.fromkeys(operations("cat", "concat", "concatenate"), _uneven),
    **dict.fromkeys((*WRITES, *operations("masked_select")), _always),
    torch.Tensor.__getitem__: _rearranged,
    fused._pack_padded_sequence: _always,
    fused._pad_packed_sequence: _always,
}
