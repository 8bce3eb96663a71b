"""Which operations disturb a regular layout, so that samples must be numbered."""

from collections.abc import Callable

import torch
from torch import Tensor

from dome.samples.tracing.dims import acts_along
from dome.samples.tracing.families import (
    ALONG,
    ROLLING,
    SELECTING,
    SIZED,
    SORTING,
    SPLITTING,
)
from dome.samples.tracing.flow import indexed_axis
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.step import Step, operations
from dome.samples.tracing.writing import WRITES
from dome.torch_private import fused


def wants_ids(step: Step) -> bool:
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
