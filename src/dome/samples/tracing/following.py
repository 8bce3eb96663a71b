"""Where the result of an operation holds its samples, and whether it mixed them.

Regular layouts are followed by shapes alone (``flow``), everything else by ids that go
through the same indexing (``indexing``).
"""

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.dims import acts_along, has_dims
from dome.samples.tracing.flow import BROADCASTING, CONTRACTING, is_movement, regular
from dome.samples.tracing.indexing import by_ids, has_rule
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.origins import Batched
from dome.samples.tracing.probing import brings_together, is_pointwise
from dome.samples.tracing.step import Step, operations
from dome.samples.tracing.touching import wants_ids

# Arguments of these line up from the right: samples must lie in the same dimension.
_CREATING = frozenset(operations("new_zeros", "new_ones", "new_empty", "new_full"))
_ALIGNED = BROADCASTING | frozenset(operations("scaled_dot_product_attention"))


def follow(step: Step) -> Batched | None:
    """What an operation itself makes of the samples; None for a constant."""
    if wants_ids(step):
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
        if step.out.requires_grad:
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

    def spot(t: Tensor, axis: Axis) -> tuple[int, int]:
        return axis.dim - t.ndim, axis.inner

    leading = spot(step.x, step.axis)
    return any(
        # A mask passed to the model may be square by chance; a mask has fewer entries.
        spot(t, axis) != leading and (t.requires_grad or t.numel() >= step.x.numel())
        for t, axis in step.known[1:]
        if not isinstance(axis, Labels)
    )


def _name(step: Step) -> str:
    return f"{step.func.__name__.strip('_')!r}"
