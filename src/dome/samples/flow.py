"""How operations move the samples: the axis of a result from the axes of the inputs.

Views and reshapes follow exact rules, so that a time axis of the same length is never
taken for the batch. For the rest, an axis that stays in place is recognised by its
size; what is still ambiguous is tried on shapes alone, with one sample more.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dome.samples.axis import Axis

Axes = Callable[[Tensor], Axis | None]


def operations(*names: str) -> Iterator[Callable[..., Any]]:
    """Every torch function and tensor method of these names."""
    for name in names:
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.special):
            if hasattr(owner, name):
                yield getattr(owner, name)


BROADCASTING = frozenset(
    operations(
        *("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide"),
        *(
            "add_",
            "sub_",
            "mul_",
            "div_",
            "rsub",
            "__rsub__",
            "__rdiv__",
            "__rtruediv__",
        ),
        *(
            "__radd__",
            "__rmul__",
            "__rpow__",
            "__add__",
            "__sub__",
            "__mul__",
            "__pow__",
        ),
        *("__truediv__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("pow", "pow_", "float_power", "maximum", "minimum", "fmax", "fmin", "where"),
        *(
            "addcmul",
            "addcdiv",
            "lerp",
            "atan2",
            "hypot",
            "logaddexp",
            "xlogy",
            "clamp",
        ),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "remainder"),
    )
)
RESHAPING = frozenset(
    operations(
        *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "ravel"),
        *("view_as", "reshape_as", "atleast_1d", "atleast_2d"),
    )
)
PERMUTING = frozenset(
    [
        *operations("transpose", "permute", "movedim", "moveaxis", "swapaxes"),
        *operations("swapdims", "t", "adjoint"),
        *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
    ]
)
_MIXING = frozenset(
    operations("einsum", "tensordot", "matmul", "__matmul__", "chain_matmul")
)
_REORDERING = frozenset(
    operations("flip", "roll", "sort", "argsort", "index_select", "flipud", "msort")
)
_REPEATING = frozenset(
    operations("repeat", "tile", "repeat_interleave", "expand", "expand_as")
)
_INTERLEAVING = frozenset(operations("repeat_interleave"))
# Their result is their argument, whose old shape is gone by the time it is asked for.
_RESTRIDING = frozenset(operations("squeeze_", "unsqueeze_", "t_", "transpose_"))


def follow(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: Tensor,
    axis: Axis,
    out: Tensor,
    axes: Axes,
) -> Axis | None:
    """Axis of one result of an operation, None if the samples are lost sight of.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        x: The first argument that holds samples.
        axis: Where in x.
        out: The result.
        axes: Looks up where any tensor holds samples.
    """
    if func in RESHAPING:
        return axis.reshaped(x.shape, out.shape)
    if func in PERMUTING:
        marked = torch.empty(tuple(range(2, x.ndim + 2)), device="meta")
        dims = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}
        return axis.moved(func(marked, *args[1:], **dims).shape.index(axis.dim + 2))
    if func is torch.Tensor.__getitem__:
        return _indexed(x, args[1], axis)
    if func is torch.Tensor.__setitem__:
        return assigned_axis(out, args[1], x, axis)
    if func in _RESTRIDING:
        return None
    if func in _REORDERING and not _same_order(args, kwargs, x, axis):
        return None
    if func in BROADCASTING:
        return axis.moved(out.ndim - x.ndim + axis.dim)
    if func in _REPEATING:
        return _repeated(func, args, kwargs, x, axis, out)
    if func not in _MIXING:
        if out.ndim == x.ndim and axis.fits(out.shape):
            return axis
        size = x.shape[axis.dim]
        places = [dim for dim, length in enumerate(out.shape) if length == size]
        if len(places) == 1:
            return axis.moved(places[0])
    return _probed(func, args, kwargs, axis, out, axes)


def _repeated(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: Tensor,
    axis: Axis,
    out: Tensor,
) -> Axis | None:
    moved = axis.moved(out.ndim - x.ndim + axis.dim)
    if func not in _INTERLEAVING or out.shape[moved.dim] == x.shape[axis.dim]:
        return moved
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    if not isinstance(repeats, int):
        return None
    return Axis(axis.dim, axis.batch, axis.inner * repeats)


def _same_order(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, axis: Axis
) -> bool:
    """Whether an operation that reorders along some dimensions leaves the batch alone."""
    named = [kwargs[key] for key in ("dim", "dims") if key in kwargs]
    given = named or [a for a in args[1:] if isinstance(a, int | tuple | list)]
    if not given:
        return False
    dims = given[-1] if isinstance(given[-1], tuple | list) else (given[-1],)
    return all(d % x.ndim != axis.dim for d in dims)


def _indexed(x: Tensor, index: Any, axis: Axis) -> Axis | None:  # noqa: ANN401 (torch)
    """Axis of ``x[index]`` for integers, slices, None, ... and one tensor elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    consumed = sum(_width(i) for i in index)
    dim = place = 0
    for i in index:
        if i is None:
            place += 1
            continue
        width = x.ndim - consumed if i is Ellipsis else _width(i)
        if dim <= axis.dim < dim + width:
            untouched = i is Ellipsis or (isinstance(i, slice) and i == slice(None))
            return axis.moved(place + axis.dim - dim) if untouched else None
        dim += width
        place += width if i is Ellipsis else _places(i)
    return axis.moved(place + axis.dim - dim)


def assigned_axis(target: Tensor, index: Any, value: Tensor, axis: Axis) -> Axis | None:  # noqa: ANN401
    """Where ``target[index] = value`` puts the samples of the value, if that is clear."""
    place = target[index].ndim - value.ndim + axis.dim
    for dim in range(target.ndim):
        held = axis.moved(dim)
        if held.fits(target.shape):
            found = _indexed(target, index, held)
            if found is not None and found.dim == place:
                return held
    return None


def _width(i: Any) -> int:  # noqa: ANN401 (torch)
    """Dimensions of the indexed tensor that an index takes."""
    if i is None or i is Ellipsis:
        return 0
    boolean = isinstance(i, Tensor) and i.dtype == torch.bool
    return i.ndim if boolean else 1


def _places(i: Any) -> int:  # noqa: ANN401 (torch)
    """Dimensions of the result that an index leaves."""
    if isinstance(i, Tensor):
        return 1 if i.dtype == torch.bool else i.ndim
    return int(isinstance(i, slice | list))


def _probed(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axis: Axis,
    out: Tensor,
    axes: Axes,
) -> Axis | None:
    """The dimension of the result that grows with one sample more, on shapes alone."""

    def grown(t: Tensor) -> Tensor:
        found, shape = axes(t), list(t.shape)
        if found is not None:
            shape[found.dim] += shape[found.dim] // found.batch
        return torch.empty(shape, dtype=t.dtype, device="meta")

    try:
        args, kwargs = tree_map_only(Tensor, grown, (args, kwargs))
        result = func(*args, **kwargs)
    except Exception:  # noqa: BLE001 (whatever a kernel says, the answer is: unknown)
        return None
    first = result if isinstance(result, Tensor) else result[0]
    changed = [
        d for d, n in enumerate(first.shape) if d >= out.ndim or n != out.shape[d]
    ]
    return axis.moved(changed[0]) if len(changed) == 1 else None
