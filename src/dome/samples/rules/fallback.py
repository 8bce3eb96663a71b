"""Any other operation: vmap over the samples, each with a copy of the weight.

Slower than a rule, but right for whatever vmap understands: the forward runs once,
vectorised over samples, and autograd does the backward.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.samples.rules.broadcast import spread, spread_copies
from dome.samples.rules.numbered import spread_by_number
from dome.samples.rules.recording import compare, drawn_again, generators, recording
from dome.samples.tracing.axis import Axis, Labels
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import Call, einsum_words
from dome.samples.tracing.trace import Trace
from dome.torch_private import tree_flatten, tree_map, tree_unflatten, unpacked


@recording
def fallback(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
    """Run an operation without a rule once for each sample, vectorised."""
    values, spec = tree_flatten((args, kwargs))
    # What an index or a mask names may differ from batch to batch.
    call.is_due |= not trace.again and any(map(_names, values))
    rows = _numbered(trace, call)
    if rows is None:
        axes = _axes(trace, call, values)
    else:
        axes = _row_axes(trace, call, values, rows)
    alone = _Alone(trace, call, values, spec, axes, rows)
    lifted = [_lifted(trace, values[i], axis, rows) for i, axis in axes.items()]
    try:
        out = alone.run(lifted)
    except Exception as error:
        if trace.again:
            raise  # a checkpoint stops when it has computed what it needs
        problem = f"{_name(call)!r} has no rule ({error})"
        raise trace.lost(problem, *call.derived) from error
    if call.is_due and not call.in_place:
        alone.compare_elsewhere([t.shape for t, _ in lifted])
    return out


@dataclass(frozen=True, slots=True)
class _Alone:
    """An operation that is run for each sample, or for each row of a known sample.

    Attributes:
        trace: Knows where the weights come from.
        call: The operation.
        values: Its arguments, one after the other.
        spec: How they are nested.
        axes: Which of them differ from sample to sample, and where; None for weights.
        rows: The sample of each row, if they are known by number alone.
    """

    trace: Trace
    call: Call
    values: list[Value]
    spec: Value
    axes: dict[int, Axis | None]
    rows: Labels | None

    def run(self, lifted: list[tuple[Tensor, int]]) -> Value:
        """The results of all samples, put together as those of the batch."""
        stacks, places = zip(*lifted, strict=True)
        dtype = _autocast_type(self.call)

        def one_sample(*own: Tensor) -> Value:
            mine = list(self.values)
            for (i, axis), t in zip(self.axes.items(), own, strict=True):
                mine[i] = t if axis is None else t.flatten(axis.dim, axis.dim + 1)
            args, kwargs = tree_unflatten([_cast(v, dtype) for v in mine], self.spec)
            return self.call.func(*args, **kwargs)

        with warnings.catch_warnings():
            # Where vmap has no rule either it loops, and says so: correct, if slow.
            warnings.filterwarnings("ignore", "There is a performance drop")
            out = torch.vmap(one_sample, places, randomness="different")(*stacks)
        first = next(axis for axis in self.axes.values() if axis is not None)
        return tree_map(
            lambda t, whole: _joined(self.trace, t, whole, first, self.rows),
            *(out, self.call.value),
        )

    def compare_elsewhere(self, shapes: list[torch.Size]) -> None:
        """Compare with the operation itself where all numbers are different.

        Those of a new model need not be: a projection may start at zero. Gradients as
        well: vmap has wrong ones for some operations (select_scatter in torch 2.13).
        """
        other = [
            _shifted(v) if i in self.axes else v for i, v in enumerate(self.values)
        ]
        given = [t for t in tensors(other) if t.requires_grad]
        lifted = [
            (other[i].expand(shape), 0)
            if axis is None
            else (axis.split(other[i]), axis.dim + 1)
            for (i, axis), shape in zip(self.axes.items(), shapes, strict=True)
        ]
        args, kwargs = tree_unflatten(other, self.spec)
        sources = generators(self.call)
        start = [get() for get, _ in sources]
        try:
            # A checkpoint counts what is saved: none of this is.
            with drawn_again(sources, start), torch.enable_grad(), unpacked():
                twins = tensors(self.run(lifted))
                values = tensors(self.call.func(*args, **kwargs))
                slopes = zip(_slopes(twins, given), _slopes(values, given), strict=True)
        except Exception:  # noqa: BLE001 (numbers it does not take)
            return
        for twin, value in zip(twins, values, strict=True):
            if value.is_floating_point() or value.is_complex():
                compare(self.trace, self.call, twin, value)
        for twin, value in slopes:
            compare(self.trace, self.call, twin, value, "gradients")


def _slopes(results: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    """Gradients of some sum of the results, each with a weight of its own."""
    ours = [t for t in results if t.requires_grad]
    deltas = [_shifted(torch.zeros_like(t)) for t in ours]
    return list(torch.autograd.grad(ours, given, deltas, materialize_grads=True))


def _shifted(t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return t
    ramp = torch.arange(t.numel(), device=t.device, dtype=torch.float32)
    golden = (ramp * 0.618034) % 1
    other = t.detach() + golden.view(t.shape).to(t.dtype)
    return other.requires_grad_(t.requires_grad)


def _names(value: Value) -> bool:
    """Whether a value is a tensor of indices or a mask."""
    if not isinstance(value, Tensor):
        return False
    return not (value.is_floating_point() or value.is_complex())


def _axes(trace: Trace, call: Call, values: list[Value]) -> dict[int, Axis | None]:
    """Which values differ from sample to sample, and along what; None for weights.

    A weight that was expanded to the batch, as a class token is, is replaced by one
    that is spread over the samples.
    """
    axes: dict[int, Axis | None] = {}
    batched = set(map(id, call.batched))
    for i, value in enumerate(values):
        if id(value) in batched:
            axes[i] = trace.axis(value)
            if axes[i] is None:
                problem = (
                    f"{_name(call)!r} of {tuple(value.shape)}, which hides the batch"
                )
                raise trace.lost(problem, *call.derived)
    place, first = next((i, axis) for i, axis in axes.items() if axis is not None)
    size = values[place].shape[first.dim]
    held = _held(call, place, first)
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and trace.sink(value) is not None:
            if i in held and value.shape[held[i]] == size:
                axes[i] = own = first.moved(held[i])
                values[i] = spread(trace, value, own, size)
                continue
            copies = spread_copies(trace, value, first, size)
            values[i] = value if copies is None else copies
            axes[i] = None if copies is None else first
    return axes


def _held(call: Call, place: int, axis: Axis) -> dict[int, int]:
    """Where weights of an ``einsum`` hold a part for each sample, by the letters."""
    words = einsum_words(call.args) if call.func is torch.einsum else None
    if words is None:
        return {}
    letter = words[place - 1][axis.dim]
    return {i: w.index(letter) for i, w in enumerate(words[:-1], 1) if letter in w}


def _numbered(trace: Trace, call: Call) -> Labels | None:
    """The samples of each row, if they are known by number alone."""
    for t in call.batched:
        place = trace.place(t)
        if isinstance(place, Labels):
            return place
    return None


def _row_axes(
    trace: Trace, call: Call, values: list[Value], rows: Labels
) -> dict[int, Axis | None]:
    """As ``_axes``, but vmap runs over rows, each with its own copy of the weights."""
    num = rows.ids.numel()
    axes: dict[int, Axis | None] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and trace.sink(value) is not None:
            axes[i] = None
        elif isinstance(value, Tensor) and trace.place(value) is not None:
            place = trace.place(value)
            dims = place.dims if isinstance(place, Labels) else ()
            dims = (place.dim,) if isinstance(place, Axis) else dims
            if len(dims) != 1 or value.shape[dims[0]] != num:
                problem = f"{_name(call)!r} of {tuple(value.shape)} by number"
                raise trace.lost(problem, *call.derived)
            axes[i] = Axis(dims[0], num)
    return axes


def _lifted(
    trace: Trace, value: Tensor, axis: Axis | None, rows: Labels | None
) -> tuple[Tensor, int]:
    """A value as vmap takes it, and the dimension vmap is to run over."""
    if axis is None and rows is not None:
        ids = rows.ids.reshape(-1, *(1,) * value.ndim)
        return spread_by_number(trace, value, ids), 0
    if axis is None:
        return spread(trace, value, Axis(-1, trace.batch), trace.batch), 0
    return axis.split(value), axis.dim + 1


def _autocast_type(call: Call) -> torch.dtype | None:
    """The type autocast chose, which vmap does not see."""
    if not torch.is_autocast_enabled(call.batched[0].device.type):
        return None
    return tensors(call.value)[0].dtype


def _cast(value: Value, dtype: torch.dtype | None) -> Value:
    real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if real and dtype is not None else value


def _joined(
    trace: Trace, out: Tensor, whole: Tensor, axis: Axis, rows: Labels | None
) -> Tensor:
    """Results of the samples (B, *result) put back along the batch dimension."""
    dims = [d for d, n in enumerate(whole.shape) if n != out.shape[d + 1]]
    dim = dims[0] if dims else min(axis.dim, whole.ndim - 1)
    split = out.unflatten(dim + 1, (-1, axis.inner)).movedim(0, dim + 1)
    joined = split.reshape(whole.shape)
    if rows is None:
        trace.mark_axis(joined, axis.moved(dim))
    else:
        ids = rows.ids.reshape(*(1,) * dim, -1, *(1,) * (joined.ndim - dim - 1))
        trace.mark_axis(joined, Labels(ids, rows.batch))
    return joined


def _name(call: Call) -> str:
    return getattr(call.func, "__name__", str(call.func))
