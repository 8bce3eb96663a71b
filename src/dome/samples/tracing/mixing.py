"""Which entries an operation brings together, by torch's word or by trying it.

Torch's own schemas say where an operation takes its ``dim``; what takes none and keeps
the shape works entry by entry. An operation without a rule is tried once: every second
sample is exchanged for other numbers. If that changes a result of one that stayed, the
operation mixes them; if not, it is taken to treat each alone. The answer holds for all
calls of these shapes.
"""

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import Step
from dome.torch_private import schema_arguments, tree_flatten, tree_map_only

Dims = tuple[int, ...]

# Matrices in the last two dimensions.
_MATRICES = {
    *("inverse", "det", "logdet", "slogdet", "pinverse", "cholesky", "qr", "svd"),
    *("linalg_inv", "linalg_det", "linalg_slogdet", "linalg_cholesky", "linalg_qr"),
    *("linalg_svd", "linalg_eigh", "linalg_eigvalsh", "linalg_solve", "linalg_pinv"),
    *("matrix_exp", "linalg_matrix_exp", "matrix_power", "linalg_matrix_power"),
    *("trace", "scaled_dot_product_attention", "cov", "corrcoef", "pdist"),
}
_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def acts_along(
    func: Callable[..., Value],
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    x: Tensor,
) -> Dims:
    """Dimensions of x whose entries meet in a result; all of them for a total."""
    where = _known(func)
    if where is None:
        return ()
    place, names, default = where
    if names == ("normalized_shape",):
        return _trailing(x, len(_argument(args, kwargs, place, names, ())))
    if place < 0:
        return _trailing(x, default)
    given = _argument(args, kwargs, place, names, default)
    if isinstance(given, Tensor | str):
        return ()  # torch.max(x, y); names of dimensions
    given = (given,) if isinstance(given, int) else given
    if not given:
        return _without_dim(func, x)
    return tuple(d % x.ndim for d in given if isinstance(d, int) and x.ndim)


def has_dims(func: Callable[..., Value]) -> bool:
    """Whether it is known along which dimensions an operation works."""
    return _known(func) is not None


def _trailing(x: Tensor, count: int) -> Dims:
    return tuple(range(max(x.ndim - count, 0), x.ndim))


def _argument(
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    place: int,
    names: tuple[str, ...],
    default: Value,
) -> Value:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _without_dim(func: Callable[..., Value], x: Tensor) -> Dims:
    if "soft" in func.__name__:  # torch's own choice, of which it warns
        return (0 if x.ndim in (0, 1, 3) else 1,)
    return tuple(range(x.ndim))


@cache
def _known(func: Callable[..., Value]) -> tuple[int, tuple[str, ...], Value] | None:
    """Where ``dim`` stands, its names and its default; (-1, (), count) without one."""
    name = func.__name__
    name = name if name.startswith("__") else name.rstrip("_")
    if name in ("layer_norm", "rms_norm"):
        return 1, ("normalized_shape",), None
    if name in ("linear", "bilinear"):
        return -1, (), 1
    if name in _MATRICES:
        return -1, (), 2
    if "pool" in name or name.startswith("conv"):
        spatial = next((n for ends, n in _SPATIAL.items() if ends in name), None)
        channels = name.startswith("conv")
        return None if spatial is None else (-1, (), spatial + channels)
    if isinstance(func, FunctionType):
        return _of_signature(func)
    return _of_schemas(name)


def _of_signature(func: FunctionType) -> tuple[int, tuple[str, ...], Value] | None:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # Tensor.__pow__ and its kin are C inside
        return None
    for place, p in enumerate(parameters):
        if p.name in ("dim", "axis", "dims"):
            default = None if p.default is inspect.Parameter.empty else p.default
            return place, (p.name,), default
    return None


def _of_schemas(name: str) -> tuple[int, tuple[str, ...], Value] | None:
    if name == "renorm":
        return None  # its dim is the one that it leaves alone
    for arguments in schema_arguments(name):
        for place, (argument, kind, default) in enumerate(arguments):
            if argument == "dim" and "Dimname" not in kind:
                return place, ("dim", "axis"), default
    return None


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
