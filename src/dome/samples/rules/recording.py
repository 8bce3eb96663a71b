"""Rules that only record: the value of an operation is the operation's own.

    value = func(the weights as they are)          what the model continues with
    twin  = func(a copy of the weights a sample)   the same numbers, with a graph
    backward: the gradient of the value goes to the twin

No such rule can change a forward pass. A twin of other numbers has another gradient: it
is compared with the value now and then, and refused.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.function import Context, apply
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import BROADCASTING, Call, own
from dome.samples.tracing.trace import Trace
from dome.torch_private import (
    own_arithmetic,
    rounding,
    tree_flatten,
    tree_unflatten,
    unseen,
)

Rule = Callable[..., Value]
# What returns the state of a random generator, and what sets it.
Generator = tuple[Callable[[], Tensor], Callable[[Tensor], None]]

# All such rules.
RECORDED: set[Rule] = set()

# Twin and value are compared the first time that an operation meets these weights and
# shapes, and then every so many times.
EVERY = 100
# Shapes may never end, as lengths of sequences do: then all are new once more.
MOST_SITES = 10_000


def recording(rule: Rule) -> Rule:
    """A rule whose results only record: the model gets the operation's own."""

    @wraps(rule)
    def run(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
        if call.in_place:
            return _written(rule, trace, call, *args, **kwargs)
        call.is_due = _is_due(trace, call)
        sources = generators(call)
        start = [get() for get, _ in sources]
        flat, spec = _parts(call.plain())
        needed = [isinstance(t, Tensor) and t.requires_grad for t in flat]
        values = [own(t) if isinstance(t, Tensor) else t for t in flat]
        call.value = _whole(values, spec)
        if not any(needed):
            return call.value
        with drawn_again(sources, start):
            twins, _ = _parts(rule(trace, call, *args, **kwargs))
        if len(twins) != len(values):
            raise _refusal(trace, call, "has other results")
        for i, need in enumerate(needed):
            if need:
                values[i] = _valued(trace, call, twins[i], values[i])
        return _whole(values, spec)

    RECORDED.add(run)
    return run


def _written(
    rule: Rule, trace: Trace, call: Call, *args: Value, **kwargs: Value
) -> Value:
    """The same where an operation writes to its first argument."""
    call.is_due = _is_due(trace, call)
    sources, target = generators(call), call.args[0]
    start = [get() for get, _ in sources]
    copy = target.detach().clone()
    replace(call, args=(copy, *call.args[1:])).plain()
    call.value = copy.detach()
    with drawn_again(sources, start):
        if not copy.requires_grad:
            return call.func(*call.args, **call.kwargs)
        out = rule(trace, call, *args, **kwargs)
    compare(trace, call, target, call.value)
    # Not seen by autograd, which may have saved the result: these are its numbers.
    target.data.copy_(call.value)
    return out


def _parts(value: Value) -> tuple[list[Value], Value]:
    """All parts of a result, and how they are nested; None for a tensor alone."""
    return ([value], None) if isinstance(value, Tensor) else tree_flatten(value)


def _whole(parts: list[Value], spec: Value) -> Value:
    return parts[0] if spec is None else tree_unflatten(parts, spec)


def _valued(trace: Trace, call: Call, twin: Value, value: Tensor) -> Tensor:
    """A value whose gradient goes to its twin, which holds the same samples."""
    if not isinstance(twin, Tensor) or twin.shape != value.shape:
        raise _refusal(trace, call, "has other shapes")
    if not twin.requires_grad:
        raise _refusal(trace, call, "has no gradient")
    compare(trace, call, twin, value)
    out: Tensor = apply(_Valued, twin, [value])
    if trace.knows(twin):
        trace.mark(out, trace.origin(twin))
    return out


class _Valued(Function):
    @staticmethod
    def forward(ctx: Context, twin: Tensor, value: list[Tensor]) -> Tensor:
        ctx.dtype = twin.dtype
        return value[0]

    @staticmethod
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor, None]:
        return delta.to(ctx.dtype), None


def compare(
    trace: Trace, call: Call, twin: Tensor, value: Tensor, what: str = "values"
) -> None:
    """Raise if it is due and a twin has other numbers than rounding explains."""
    if not call.is_due or not value.numel():
        return
    # Sums of n products in another order differ by √n roundings, and by more of the
    # result where they cancel. What is not the same operation differs by all of it.
    allowed = max(rounding(t) for t in (value, *call.batched, *call.derived)) ** 0.5
    with unseen():
        doubt = _differ(twin, value, allowed)
    words = f"has other {what} (relative deviation above {allowed:.0e})"
    trace.questions.raise_if(doubt, _refusal(trace, call, words))


@own_arithmetic
def _differ(twin: Tensor, value: Tensor, allowed: float) -> Tensor:
    """Whether two tensors differ by more than this share of the largest entry."""
    twin = twin.detach().to(value.dtype)
    off, size = (twin - value).abs(), value.abs()
    largest = torch.where(size.isfinite(), size, 0).amax()
    same = (off <= allowed * largest) | (twin == value)
    return ~(same | (twin.isnan() & value.isnan())).all()


def _is_due(trace: Trace, call: Call) -> bool:
    """Whether an operation meets these weights and shapes for the first time, or so."""
    if trace.again:
        return False
    site = _site(trace, call)
    if site not in trace.compared and len(trace.compared) == MOST_SITES:
        trace.compared.clear()
    count = trace.compared[site] = trace.compared.get(site, -1) + 1
    return count % EVERY == 0


def _site(trace: Trace, call: Call) -> tuple[Hashable, ...]:
    values = (*call.args, *call.kwargs.values())
    plain = (v for v in values if isinstance(v, bool | int | float | str | None))
    shapes = ((t.shape, t.dtype) for t in tensors(values))
    weights = (p for t in call.derived for p in trace.sources(t))
    return call.func, *plain, *shapes, *map(id, weights)


def _refusal(trace: Trace, call: Call, what: str) -> RuntimeError:
    name = getattr(call.func, "__name__", str(call.func))
    return trace.lost(
        f"{name!r}, taken for each sample alone, {what} than on the batch",
        *call.derived,
    )


def generators(call: Call) -> list[Generator]:
    """The random generators that an operation may draw from."""
    if call.func in BROADCASTING:
        return []
    device = (*call.batched, *call.derived)[0].device
    found: list[Generator] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        which = () if device.type == "mps" else (device,)  # there is one alone
        if hasattr(module, "get_rng_state"):

            def put(state: Tensor) -> None:
                module.set_rng_state(state, *which)

            found.append((partial(module.get_rng_state, *which), put))
    return found


@contextmanager
def drawn_again(sources: list[Generator], start: list[Tensor]) -> Iterator[None]:
    """Inside, numbers are drawn from these states on once more."""
    end = [get() for get, _ in sources]
    for (_, put), state in zip(sources, start, strict=True):
        put(state)
    try:
        yield
    finally:
        for (_, put), state in zip(sources, end, strict=True):
            put(state)
