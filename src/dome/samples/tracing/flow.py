"""How operations move the samples: the axis of a result from the axes of the inputs.

Views and reshapes follow exact rules, so that a time axis of the same length is never
taken for the batch. For the rest, an axis that stays in place is recognised by its
size; what is still ambiguous is tried on shapes alone, with one sample more.
"""

from collections.abc import Callable, Sequence
from string import ascii_uppercase

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value
from dome.samples.tracing.step import ROLLING, SELECTING, Step, operations
from dome.torch_private import tree_map_only


def regular(step: Step) -> Axis | None:
    """Axis of the result of an operation, None if the samples are lost sight of."""
    axis = _MOVES.get(step.func, _kept)(step)
    return axis if axis is not None and axis.fits(step.out.shape) else None


def is_movement(func: Callable[..., Value]) -> bool:
    """Whether an operation has an exact rule of its own."""
    return func in _MOVES


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


def einsum_words(args: tuple[Value, ...]) -> list[str] | None:
    """The letters of every operand and of the result; None if they are not spelt."""
    equation = args[0]
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    words = inputs.split(",")
    if "." in equation:
        # An ellipsis stands for letters of its own, lined up from the right.
        spare = "".join(c for c in ascii_uppercase if c not in equation)
        operands = einsum_operands(args)
        most = max(
            (
                t.ndim - len(w) + 3
                for w, t in zip(words, operands, strict=True)
                if "." in w
            )
        )
        words = [
            w.replace("...", spare[most - (t.ndim - len(w) + 3) : most])
            for w, t in zip(words, operands, strict=True)
        ]
        output = output.replace("...", spare[:most])
    return [*words, output]


def einsum_operands(args: tuple[Value, ...]) -> Sequence[Tensor]:
    """The operands, given one by one or in a list."""
    return args[1:] if isinstance(args[1], Tensor) else args[1]


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


def indexed_axis(x: Tensor, index: Value, axis: Axis) -> Axis | None:
    """Axis of ``x[index]`` for integers, slices, None, ... and one tensor elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    consumed = sum(_width(i) for i in index)
    dim = place = 0
    for i in index:
        width = x.ndim - consumed if i is Ellipsis else _width(i)
        if dim <= axis.dim < dim + width:
            untouched = i is Ellipsis or _is_whole(i, x.shape[axis.dim])
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


def _is_whole(i: Value, size: int) -> bool:
    """Whether an index is a slice that leaves a dimension of this size as it is."""
    if not isinstance(i, slice) or isinstance(i.start, Tensor):
        return False
    return not isinstance(i.stop, Tensor) and i.indices(size) == (0, size, 1)


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
