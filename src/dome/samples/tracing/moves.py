"""Where the result of an operation holds its samples, and whether it mixed them.

A regular layout is followed by shapes alone. Views and reshapes follow exact rules, so
that a time axis of the same length is never taken for the batch. For the rest, an axis
that stays in place is recognised by its size; what is still ambiguous is tried on
shapes alone, with one sample more. ``_TOUCHES`` says which operations disturb a regular
layout: those are followed by number (``ids``).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis, Labels, assigned_axis, indexed_axis
from dome.samples.tracing.ids import WRITES, by_ids, has_rule
from dome.samples.tracing.mixing import (
    acts_along,
    brings_together,
    has_dims,
    is_pointwise,
)
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import (
    ALONG,
    BROADCASTING,
    ROLLING,
    SELECTING,
    SIZED,
    SORTING,
    SPLITTING,
    Batched,
    Call,
    Step,
    einsum_operands,
    einsum_words,
    operations,
)
from dome.torch_private import fused, tree_map_only


def regular(step: Step) -> Axis | None:
    """Axis of the result of an operation, None if the samples are lost sight of."""
    axis = _MOVES.get(step.func, _kept)(step)
    return axis if axis is not None and axis.fits(step.out.shape) else None


def is_movement(func: Callable[..., Value]) -> bool:
    """Whether an operation has an exact rule of its own."""
    return func in _MOVES


def _kept(step: Step) -> Axis | None:
    """The axis of most operations: in its place, or where its size is found again."""
    x, axis, out = step.x, step.axis, step.out
    if out.ndim == x.ndim and axis.fits(out.shape):
        return axis
    size = x.shape[axis.dim]
    places = [dim for dim, length in enumerate(out.shape) if length == size]
    return axis.moved(places[0]) if len(places) == 1 else _probed(step)


def _probed(step: Step) -> Axis | None:
    """The dimension of the result that grows with one sample more, on shapes alone."""

    def grown(t: Tensor) -> Tensor:
        found, shape = step.axes(t), list(t.shape)
        if found is not None:
            shape[found.dim] += shape[found.dim] // found.batch
        return torch.empty(shape, dtype=t.dtype, device="meta")

    try:
        args, kwargs = tree_map_only(Tensor, grown, (step.args, step.kwargs))
        result = step.func(*args, **kwargs)
    except Exception:  # noqa: BLE001 (whatever a kernel says, the answer is: unknown)
        return None
    first = result if isinstance(result, Tensor) else result[0]
    sizes = enumerate(zip(first.shape, step.out.shape, strict=False))
    changed = [dim for dim, (new, old) in sizes if new != old]
    return step.axis.moved(changed[0]) if len(changed) == 1 else None


def _reshaped(step: Step) -> Axis | None:
    return step.axis.reshaped(step.x.shape, step.out.shape)


def _permuted(step: Step) -> Axis | None:
    dims = step.args[1:]
    if step.func in _SWAPPING and len(dims) == 2:
        a, b = (d % step.x.ndim for d in dims)
        return step.axis.moved({a: b, b: a}.get(step.axis.dim, step.axis.dim))
    if step.func in _PERMUTING and dims:
        order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        return step.axis.moved([d % step.x.ndim for d in order].index(step.axis.dim))
    # Others are tried: every dimension is told by its size.
    marked = torch.empty(tuple(range(2, step.x.ndim + 2)), device="meta")
    named = {k: v for k, v in step.kwargs.items() if not isinstance(v, Tensor)}
    shape = step.func(marked, *dims, **named).shape
    return step.axis.moved(shape.index(step.axis.dim + 2))


def _taken_apart(step: Step) -> Axis | None:
    """``unbind``: one dimension less."""
    dim = (step.argument(1, "dim") or 0) % step.x.ndim
    return (
        None
        if dim == step.axis.dim
        else step.axis.moved(step.axis.dim - (dim < step.axis.dim))
    )


def _stacked(step: Step) -> Axis | None:
    """``stack``: one dimension more, if all parts hold their samples alike."""
    dim, own = (step.argument(1, "dim") or 0) % step.out.ndim, step.axis
    alike = all(axis == own for _, axis in step.known)
    return own.moved(own.dim + (dim <= own.dim)) if alike else None


def _multiplied(step: Step) -> Axis | None:
    """``matmul``: along stacks, rows of the first, or columns of the second."""
    first, second = (
        step.argument(0, "input"),
        step.argument(1, "other", "mat2", "tensor2"),
    )
    if min(first.ndim, second.ndim) < _MATRIX:
        return _probed(step)
    found = set()
    for t, other in ((first, -1), (second, -_MATRIX)):
        axis = step.axes(t)
        if axis is not None:
            spot = axis.dim - t.ndim
            found.add(None if spot == other else axis.moved(step.out.ndim + spot))
    return found.pop() if len(found) == 1 else None


def _strided(step: Step) -> Axis | None:
    """``as_strided`` that stays inside each sample, as overlapping windows do."""
    axis, x, out = step.axis, step.x, step.out
    size, stride = x.shape[axis.dim], x.stride(axis.dim)
    if not _in_blocks(x, axis.dim, 0):
        return None
    offset = int(out.storage_offset()) - int(x.storage_offset())
    for dim, own in enumerate(zip(out.shape, out.stride(), strict=True)):
        if own == (size, stride) and _in_blocks(out, dim, offset):
            return axis.moved(dim)
    return None


def _in_blocks(x: Tensor, dim: int, offset: int) -> bool:
    """Whether the memory of x tells the index along one dimension of every entry.

    Other dimensions step over whole blocks of that one, or stay inside one entry of it.
    """
    stride = x.stride(dim)
    block = stride * x.shape[dim]
    inside = offset % block
    for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if d != dim and s % block:
            inside += (n - 1) * s
    return inside < stride


def _from_the_right(step: Step) -> Axis | None:
    return step.axis.moved(step.out.ndim - step.x.ndim + step.axis.dim)


def _from_the_left(step: Step) -> Axis | None:
    # A table whose rows are samples is looked up at any of them.
    return step.axis if step.x is step.argument(0, "input") else None


def _contracted(step: Step) -> Axis | None:
    """``einsum``: the letter of the samples must be one, and stay."""
    words = einsum_words(step.args)
    if words is None:
        return _probed(step)
    *inputs, output = words
    pairs = zip(inputs, einsum_operands(step.args), strict=True)
    letters = {word[a.dim] for word, t in pairs if (a := step.axes(t)) is not None}
    if len(letters) != 1 or not letters <= set(output):
        return None
    return step.axis.moved(output.index(letters.pop()))


def _interleaved(step: Step) -> Axis | None:
    axis, repeats = step.axis, step.argument(1, "repeats")
    dim = step.argument(2, "dim")
    if dim is None or not isinstance(repeats, int):
        return None
    mine = dim % step.x.ndim == axis.dim
    return Axis(axis.dim, axis.batch, axis.inner * repeats) if mine else axis


def _reordered(step: Step) -> Axis | None:
    """Flips, sorts and selections: harmless along any dimension but the batch."""
    place = 2 if step.func in ROLLING else 1
    dims = step.argument(place, "dim", "dims")
    if dims is None:
        return None
    given = dims if isinstance(dims, tuple | list) else (dims,)
    if step.func in SELECTING and step.x is not step.args[0]:
        return step.axis.moved(dims % step.out.ndim)  # of a table, at samples' indices
    touched = any(dim % step.x.ndim == step.axis.dim for dim in given)
    return None if touched else step.axis


def _indexed(step: Step) -> Axis | None:
    return indexed_axis(step.x, step.args[1], step.axis)


def _assigned(step: Step) -> Axis | None:
    if step.x is step.out:
        return step.axis
    return assigned_axis(step.out, step.args[1], step.x, step.axis)


def _lost(_: Step) -> Axis | None:
    return None


def _sized(step: Step) -> Axis | None:
    """A tensor of a size that was asked for: one to fill, if as long as the batch."""
    same = step.axis.dim < step.out.ndim
    size = step.x.shape[step.axis.dim]
    return step.axis if same and step.out.shape[step.axis.dim] == size else None


_MATRIX = 2  # dimensions
_PRODUCTS = frozenset(operations("matmul", "__matmul__", "mm", "bmm"))
CONTRACTING = frozenset(
    (*operations("tensordot", "__rmatmul__"), *_PRODUCTS, torch.einsum)
)
_SWAPPING = frozenset(operations("transpose", "swapaxes", "swapdims"))
_PERMUTING = frozenset(operations("permute"))
_MOVES: dict[Callable[..., Value], Callable[[Step], Axis | None]] = {
    **dict.fromkeys(BROADCASTING, _from_the_right),
    **dict.fromkeys(operations("repeat", "tile"), _from_the_right),
    **dict.fromkeys(operations("expand", "expand_as"), _from_the_right),
    **dict.fromkeys(operations("one_hot", "embedding"), _from_the_left),
    **dict.fromkeys(operations("repeat_interleave"), _interleaved),
    **dict.fromkeys(operations("view", "reshape", "flatten", "unflatten"), _reshaped),
    **dict.fromkeys(operations("unsqueeze", "squeeze", "ravel", "view_as"), _reshaped),
    **dict.fromkeys(operations("reshape_as", "atleast_1d", "atleast_2d"), _reshaped),
    **dict.fromkeys(operations("transpose", "permute", "t", "adjoint"), _permuted),
    **dict.fromkeys(operations("movedim", "moveaxis"), _permuted),
    **dict.fromkeys(operations("swapaxes", "swapdims"), _permuted),
    **{getattr(torch.Tensor, n).__get__: _permuted for n in ("T", "mT", "H", "mH")},
    **dict.fromkeys(operations("unbind"), _taken_apart),
    **dict.fromkeys(operations("stack"), _stacked),
    **dict.fromkeys(operations("tensordot"), _probed),
    **dict.fromkeys(_PRODUCTS, _multiplied),
    torch.einsum: _contracted,
    **dict.fromkeys(operations("flip", "roll", "sort", "argsort", "msort"), _reordered),
    **dict.fromkeys(operations("index_select", "flipud"), _reordered),
    # Their result is their argument, whose old shape is gone when it is asked for.
    **dict.fromkeys(operations("squeeze_", "unsqueeze_", "t_", "transpose_"), _lost),
    **dict.fromkeys(operations("as_strided"), _strided),
    # Coordinates and counts: how many there are is no matter of samples.
    **dict.fromkeys(operations("nonzero", "argwhere", "unique", "bincount"), _lost),
    **dict.fromkeys(operations("histc", "searchsorted", "unique_consecutive"), _lost),
    **dict.fromkeys(operations("new_zeros", "new_ones", "new_empty"), _sized),
    **dict.fromkeys(operations("new_full", "full_like", "empty_like"), _sized),
    **dict.fromkeys(operations("zeros_like", "ones_like", "rand_like"), _sized),
    **dict.fromkeys(operations("randn_like", "randint_like"), _sized),
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.__setitem__: _assigned,
}


_CREATING = frozenset(
    operations(
        *("new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like"),
        *("empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    )
)
# Arguments of these line up from the right: samples must lie in the same dimension.
_ALIGNED = BROADCASTING | frozenset(operations("scaled_dot_product_attention"))

# How many arguments of these count; the rest are indices and masks.
_LEADING: dict[Callable[..., Value], int] = {
    **dict.fromkeys((*SELECTING, *ALONG, torch.Tensor.__getitem__), 1),
    **dict.fromkeys(operations("gather", "embedding"), 1),
    torch.nn.functional.multi_head_attention_forward: 3,
}


def unmoved(call: Call, out: Tensor) -> Batched | None:
    """What is known of all arguments with samples, if it holds for the result too.

    That is so, and needs no look at the arguments, where they have the same shape, hold
    their samples in the same place and meet entry by entry: most operations. ``follow``
    finds the same.
    """
    first, shape = call.origins[0], out.shape
    place = first.place
    if not isinstance(place, Axis) or not _by_entries(call.func):
        return None
    for t, origin in zip(call.batched, call.origins, strict=True):
        if not origin.is_fine or t.shape != shape or origin.place != place:
            return None
    return first


@cache
def _by_entries(func: Callable[..., Value]) -> bool:
    """Whether an entry of the result comes of the same entry of every argument."""
    plain = func not in _TOUCHES and not has_rule(func)
    lined_up = is_pointwise(func) and not is_movement(func)
    return plain and (func in BROADCASTING or lined_up)


def follow(step: Step) -> Batched | None:
    """What an operation itself makes of the samples; None for a constant."""
    if _wants_ids(step):
        place, doubt = by_ids(step)
        found = Batched(place, doubt=doubt)
    else:
        axis = regular(step)
        mixed = _mixes(step, axis) if step.axis.batch > 1 else None
        found = Batched(axis if mixed is None else axis or _suggested(step), mixed)
    if found.place is None and step.known[0][1].batch == 1 and step.out.ndim:
        return Batched(Axis(0, 1))
    if found.place is None and found.mixed is None:
        if step.func in _CREATING:
            return None
        # Also of inputs, which have no gradient: a parameter may meet them later.
        if step.out.is_floating_point() or step.out.is_complex():
            return Batched(None, hidden=_name(step), doubt=found.doubt)
    return found


def _suggested(step: Step) -> Axis | None:
    """Where mixed samples lie, as far as the shape of a result can tell."""
    return step.axis if step.axis.fits(step.out.shape) else None


def _mixes(step: Step, found: Axis | None) -> str | None:
    """The name of an operation that brings entries of several samples together."""
    func, x, axis = step.func, step.x, step.axis
    if len(step.known) > 1:
        across = func is torch.cdist and axis.dim >= x.ndim - 2
        # One row of a weight that is made of samples is one sample's.
        across |= func is torch.nn.functional.linear
        if across or (func in _ALIGNED and _clash(step)):
            return f"{_name(step)}, which pairs samples with each other"
    if func in CONTRACTING and found is None:
        return f"{_name(step)}, which pairs or sums samples"
    if is_movement(func) or is_pointwise(func) or has_rule(func):
        return None
    return _joins(step, found)


def _joins(step: Step, found: Axis | None) -> str | None:
    """The same of an operation that has no rule."""
    func, x, axis = step.func, step.x, step.axis
    if axis.dim in acts_along(func, step.args, step.kwargs, x):
        return f"{_name(step)} over dimension {axis.dim}"
    if found is not None and not has_dims(func) and brings_together(step, found):
        return f"{_name(step)}"
    return None


def _clash(step: Step) -> bool:
    """Whether two arguments hold their samples in different dimensions."""
    leading = _spot(step.x, step.axis)
    return any(
        _spot(t, axis) != leading and not _is_mask(t, step.x)
        for t, axis in step.known[1:]
        if not isinstance(axis, Labels)
    )


def _spot(t: Tensor, axis: Axis) -> tuple[int, int]:
    return axis.dim - t.ndim, axis.inner


def _is_mask(t: Tensor, x: Tensor) -> bool:
    """Whether this may be a mask, square by chance: it has fewer entries."""
    return not t.requires_grad and t.numel() < x.numel()


def partners(call: Call) -> list[Batched]:
    """What is known of the arguments whose samples meet: no masks, no indices."""
    known, leading = call.known(), call.args[: _LEADING.get(call.func, len(call.args))]
    x, first = known[0] if known else (call.batched[0], None)
    found = []
    for t, origin in zip(call.batched, call.origins, strict=True):
        place = origin.place
        if isinstance(place, Axis) and isinstance(first, Axis):
            apart = _spot(t, place) != _spot(x, first)
            if apart and _is_mask(t, x):
                continue
        if call.func not in _LEADING or any(t is own for own in leading):
            found.append(origin)
    return found


def _name(step: Step) -> str:
    return f"{step.func.__name__.strip('_')!r}"


def _wants_ids(step: Step) -> bool:
    """Whether the samples of an operation must be followed by number."""
    for _, place in step.known:
        if isinstance(place, Labels):
            return True
    touches = _TOUCHES.get(step.func)
    return touches is not None and step.axis.batch > 1 and touches(step)


def _always(_: Step) -> bool:
    return True


def _touched(step: Step) -> bool:
    """Whether the first argument's samples lie along a dimension that is worked on."""
    axis = step.axes(step.args[0]) if isinstance(step.args[0], Tensor) else None
    if axis is None:
        return False
    place = 2 if step.func in ROLLING | ALONG else 1
    dims = step.argument(place, "dim", "dims")
    if step.func in SORTING or (dims is None and step.func in SPLITTING):
        return axis.dim in (acts_along(step.func, step.args, step.kwargs, step.x))
    if step.func in SIZED:
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


_TOUCHES: dict[Callable[..., Value], Callable[[Step], bool]] = {
    **dict.fromkeys((*ROLLING, *SORTING, *SELECTING, *ALONG, *SPLITTING), _touched),
    **dict.fromkeys(operations("flip", "fliplr", "flipud", "gather"), _touched),
    **dict.fromkeys(operations("narrow", "select"), _touched),
    **dict.fromkeys(operations("repeat_interleave"), _uncounted),
    **dict.fromkeys(SIZED, _touched),
    **dict.fromkeys(operations("cat", "concat", "concatenate"), _uneven),
    **dict.fromkeys((*WRITES, *operations("masked_select")), _always),
    torch.Tensor.__getitem__: _rearranged,
    fused._pack_padded_sequence: _always,
    fused._pad_packed_sequence: _always,
}
