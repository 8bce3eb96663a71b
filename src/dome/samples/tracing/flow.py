"""How operations move the samples: the axis of a result from the axes of the inputs.

Views and reshapes follow exact rules, so that a time axis of the same length is never
taken for the batch. For the rest, an axis that stays in place is recognised by its
size; what is still ambiguous is tried on shapes alone, with one sample more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value
from dome.torch_private import tree_map_only


@dataclass(frozen=True, slots=True)
class Step:
    """An operation that ran.

    Attributes:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        x: The first argument that holds samples.
        axis: Where in x.
        out: A result.
        axes: Looks up where any tensor holds samples.
    """

    func: Callable[..., Value]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    x: Tensor
    axis: Axis
    out: Tensor
    axes: Callable[[Tensor], Axis | None]

    def argument(self, place: int, *names: str) -> Value:
        """An argument by position or by one of its names, None if it was not given."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)


def follow(step: Step) -> Axis | None:
    """Axis of the result of an operation, None if the samples are lost sight of."""
    axis = _MOVES.get(step.func, _kept)(step)
    return axis if axis is not None and axis.fits(step.out.shape) else None


def operations(*names: str) -> Iterator[Callable[..., Value]]:
    """Every torch function and tensor method of these names."""
    for name in names:
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.special):
            if hasattr(owner, name):
                yield getattr(owner, name)


BROADCASTING = frozenset(
    operations(
        *("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide"),
        *("add_", "sub_", "mul_", "div_", "rsub", "__rsub__", "__rdiv__"),
        *("__radd__", "__rmul__", "__rpow__", "__add__", "__sub__", "__mul__"),
        *("__truediv__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("__pow__", "__rtruediv__", "pow", "pow_", "float_power", "where", "clamp"),
        *("maximum", "minimum", "fmax", "fmin", "addcmul", "addcdiv", "lerp", "xlogy"),
        *("atan2", "hypot", "logaddexp", "remainder", "logical_and", "logical_or"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    )
)


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
    marked = torch.empty(tuple(range(2, step.x.ndim + 2)), device="meta")
    dims = {k: v for k, v in step.kwargs.items() if not isinstance(v, Tensor)}
    shape = step.func(marked, *step.args[1:], **dims).shape
    return step.axis.moved(shape.index(step.axis.dim + 2))


def _from_the_right(step: Step) -> Axis | None:
    return step.axis.moved(step.out.ndim - step.x.ndim + step.axis.dim)


def _from_the_left(step: Step) -> Axis | None:
    return step.axis


def _interleaved(step: Step) -> Axis | None:
    axis, repeats = step.axis, step.argument(1, "repeats")
    dim = step.argument(2, "dim")
    if dim is None or not isinstance(repeats, int):
        return None
    mine = dim % step.x.ndim == axis.dim
    return Axis(axis.dim, axis.batch, axis.inner * repeats) if mine else axis


def _reordered(step: Step) -> Axis | None:
    """Flips, sorts and selections: harmless along any dimension but the batch."""
    place = 2 if step.func in _ROLLING else 1
    dims = step.argument(place, "dim", "dims")
    if dims is None:
        return None
    given = dims if isinstance(dims, tuple | list) else (dims,)
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


def indexed_axis(x: Tensor, index: Value, axis: Axis) -> Axis | None:
    """Axis of ``x[index]`` for integers, slices, None, ... and one tensor elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    consumed = sum(_width(i) for i in index)
    dim = place = 0
    for i in index:
        width = x.ndim - consumed if i is Ellipsis else _width(i)
        if dim <= axis.dim < dim + width:
            untouched = i is Ellipsis or (isinstance(i, slice) and i == slice(None))
            return axis.moved(place + axis.dim - dim) if untouched else None
        dim += width
        place += width if i is Ellipsis else _places(i)
    return axis.moved(place + axis.dim - dim)


def assigned_axis(
    target: Tensor, index: Value, value: Tensor, axis: Axis
) -> Axis | None:
    """Where ``target[index] = value`` puts the samples, if that is clear."""
    place = target[index].ndim - value.ndim + axis.dim
    for dim in range(target.ndim):
        held = axis.moved(dim)
        if held.fits(target.shape):
            found = indexed_axis(target, index, held)
            if found is not None and found.dim == place:
                return held
    return None


def _width(i: Value) -> int:
    """Dimensions of the indexed tensor that an index takes."""
    if i is None or i is Ellipsis:
        return 0
    boolean = isinstance(i, Tensor) and i.dtype == torch.bool
    return i.ndim if boolean else 1


def _places(i: Value) -> int:
    """Dimensions of the result that an index leaves."""
    if isinstance(i, Tensor):
        return 1 if i.dtype == torch.bool else i.ndim
    return int(i is None or isinstance(i, slice | list))


_ROLLING = frozenset(operations("roll"))
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
    **dict.fromkeys(operations("einsum", "tensordot", "matmul", "__matmul__"), _probed),
    **dict.fromkeys(operations("flip", "roll", "sort", "argsort", "msort"), _reordered),
    **dict.fromkeys(operations("index_select", "flipud"), _reordered),
    # Their result is their argument, whose old shape is gone when it is asked for.
    **dict.fromkeys(operations("squeeze_", "unsqueeze_", "t_", "transpose_"), _lost),
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.__setitem__: _assigned,
}
