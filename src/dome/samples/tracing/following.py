"""Where the result of an operation holds its samples, and whether it mixed them.

Regular layouts are followed by shapes alone (``flow``), everything else by ids that go
through the same indexing (``indexing``): the table at the end says which operations
disturb a regular layout.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.dims import acts_along, has_dims
from dome.samples.tracing.flow import (
    BROADCASTING,
    CONTRACTING,
    indexed_axis,
    is_movement,
    regular,
)
from dome.samples.tracing.indexing import by_ids, has_rule
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import Batched, Call
from dome.samples.tracing.probing import brings_together, is_pointwise
from dome.samples.tracing.step import (
    ALONG,
    ROLLING,
    SELECTING,
    SIZED,
    SORTING,
    SPLITTING,
    Step,
    operations,
)
from dome.samples.tracing.writing import WRITES
from dome.torch_private import fused

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
