"""Does an operation that has no rule bring samples together? It is asked itself, once.

Every second sample is exchanged for other numbers. If that changes a result of one that
stayed, the operation mixes them; if not, it is taken to treat each alone. The answer
holds for all calls of these shapes.
"""

from collections.abc import Callable, Hashable
from functools import cache

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.step import Step
from dome.torch_private import tree_flatten, tree_map_only

# Nothing but types and places changes here.
_COPYING = frozenset(
    (
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu"),
        *("cuda", "contiguous", "detach", "real", "imag", "view_as_real"),
        *("view_as_complex", "resolve_conj", "requires_grad_", "pin_memory"),
    )
)
# Of two tensors these work entry by entry, of one they do not.
_REDUCING = frozenset(("max", "min"))
# What treats samples alone does so to the last bit, but for sums in another order.
_CHANGED = 1e-4

_answers: dict[Hashable, bool] = {}


@cache
def is_pointwise(func: Callable[..., Value]) -> bool:
    """Whether an operation works entry by entry, by torch's own word."""
    name = func.__name__
    if name in _REDUCING:
        return False
    return name in _COPYING or torch.Tag.pointwise in _tags(name.rstrip("_"))


@cache
def _cannot_be_tried(func: Callable[..., Value]) -> bool:
    """Whether an operation would draw numbers, or write to its arguments, once more."""
    name = func.__name__
    draws = "dropout" in name or torch.Tag.nondeterministic_seeded in _tags(name)
    return draws or name.endswith("_")


def _tags(name: str) -> set[torch.Tag]:
    packet = getattr(torch.ops.aten, name, None)
    # Names such as __eq__ are those of any Python object.
    overloads: list[str] = getattr(packet, "overloads", list)()
    return {tag for o in overloads for tag in getattr(packet, o).tags}


def brings_together(step: Step, place: Axis) -> bool:
    """Whether an operation without a rule mixes samples, which its result holds."""
    real = step.x.is_floating_point() or step.x.is_complex()
    if not real or "out" in step.kwargs or _cannot_be_tried(step.func):
        return False
    key = _signature(step, place)
    if key not in _answers:
        _answers[key] = _tried(step, place)
    return _answers[key]


def _signature(step: Step, place: Axis) -> Hashable:
    """All that the answer depends on."""
    values, spec = tree_flatten((step.args, step.kwargs))
    own = tuple(
        (v.shape, v.dtype, step.axes(v)) if isinstance(v, Tensor) else repr(v)
        for v in values
    )
    return step.func, step.number, place, str(spec), own


def _tried(step: Step, place: Axis) -> bool:
    return any(_changes(step, place, kept) for kept in (0, 1))


@torch.no_grad()
def _changes(step: Step, place: Axis, kept: int) -> bool:
    """Whether every second sample, from this one on, depends on the ones between."""

    def exchanged(t: Tensor) -> Tensor:
        # A copy of everything: running statistics are written to.
        axis, other = step.axes(t), t.detach().clone()
        if axis is None or not (t.is_floating_point() or t.is_complex()):
            return other
        part = axis.split(other).movedim(axis.dim + 1, 0)[1 - kept :: 2]
        part.copy_(1.7 - 2.3 * part)
        return other

    args, kwargs = tree_map_only(Tensor, exchanged, (step.args, step.kwargs))
    try:
        out = tensors(step.func(*args, **kwargs))[step.number]
    except Exception:  # noqa: BLE001 (numbers it does not take: nobody knows)
        return True
    before, after = (
        place.split(t.detach()).movedim(place.dim + 1, 0)[kept::2]
        for t in (step.out, out)
    )
    close = torch.isclose(before, after, _CHANGED, _CHANGED, equal_nan=True)
    return not bool(close.all())
