"""``sample_rule``: operations of the user's, of which capture knows nothing.

    out = operation(x, weight)          as it is, with its own gradient
    rows[b] = ∂ (delta · out) / ∂ weight, of sample b alone      by the rule

The rule only adds rows: values and gradients are the operation's own, and the audit
compares the sum of the rows with the gradient.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function

from dome.samples.rules import RULES
from dome.samples.rules.function import Context, apply, first_order
from dome.samples.store.sink import Sink
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.origins import Call, own
from dome.samples.tracing.trace import Trace
from dome.torch_private import in_function_mode, overloads_of

SampleRule = Callable[..., Any]  # a dictionary of rows by name, which is checked
Given = TypeVar("Given", bound=SampleRule)


def sample_rule(operation: Any) -> Callable[[Given], Given]:  # noqa: ANN401
    """Tell dome the per-sample gradients of an operation of your own.

        @dome.sample_rule(Scale)
        def scale_rows(delta, x, weight):
            return {"weight": delta * x}

    The first dimension of the result, and of what holds samples among the arguments,
    must enumerate the samples. Without a function to decorate, the call makes an
    autograd function with ``generate_vmap_rule = True`` visible: its samples are then
    taken by ``torch.vmap``.

    Args:
        operation: A class of ``torch.autograd.Function``, to be used by its ``apply``
            from then on; or an operation of ``torch.library``.

    Returns:
        A decorator. The rule it takes is called as rule(delta, *arguments): with the
        gradient of the result, and what the operation was called with. It returns, by
        the names of its parameters, the gradients of each weight (B, *weight).
    """
    keys = _seen_as(operation)

    def decorate(rule: Given) -> Given:
        if not callable(rule):
            raise ValueError(f"a rule must be a function, got {rule!r}")
        for key in keys:
            RULES[key] = _captured(rule)
        return rule

    return decorate


def _seen_as(operation: Any) -> tuple[Callable[..., Value], ...]:  # noqa: ANN401
    """What capture sees of an operation, an autograd function made visible."""
    if isinstance(operation, type) and issubclass(operation, Function):
        if not hasattr(operation.apply, "sees"):
            operation.apply = _visible(operation)  # type: ignore[method-assign]
        return (operation.apply,)
    found = overloads_of(operation)
    if not found:
        raise ValueError(
            f"operation must be a class of torch.autograd.Function or an operation of "
            f"torch.library, got {operation!r}: a function of torch's own operations "
            f"needs no rule"
        )
    return found


def _visible(function: type[Function]) -> Callable[..., Value]:
    """``function.apply`` as an operation that modes of torch see."""
    plain: Callable[..., Value] = function.apply
    handled = cast("Callable[..., Value]", handle_torch_function)

    @wraps(function.forward)
    def run(*args: Value, **kwargs: Value) -> Value:
        if in_function_mode():
            found = tensors((args, tuple(kwargs.values())))
            return handled(run, found, *args, **kwargs)
        return plain(*args, **kwargs)

    run.__name__ = function.__name__
    run.sees = function  # type: ignore[attr-defined] # a mark: this was done before
    return run


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A call of the operation in which samples meet weights.

    Attributes:
        rule: The user's.
        given: Its arguments; tensors are kept by autograd meanwhile.
        axis: Where samples lie.
        sinks: Where rows go, by the rule's names of the weights.
        shapes: Of these weights.
        where: Names a parameter, for errors.
    """

    rule: SampleRule
    given: inspect.BoundArguments
    axis: Axis
    sinks: Mapping[str, Sink]
    shapes: Mapping[str, torch.Size]
    where: str

    @classmethod
    def of(cls, rule: SampleRule, trace: Trace, call: Call, axis: Axis) -> "_Meeting":
        given = inspect.signature(rule).bind(None, *call.args, **call.kwargs)
        found = {n: t for n, t in given.arguments.items() if isinstance(t, Tensor)}
        known = {n: sink for n, t in found.items() if (sink := trace.sink(t))}
        shapes = {n: found[n].shape for n in known}
        name = getattr(rule, "__name__", repr(rule))
        where = f"the rule {name!r} for parameter {trace.name(*call.derived)!r}"
        return cls(rule, given, axis, known, shapes, where)

    def take_tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, which are here no more."""
        given = self.given.arguments
        found = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        given.update(dict.fromkeys(found))
        return found

    def put(self, delta: Tensor, found: Mapping[str, Tensor]) -> None:
        """Store the rows of the weights whose gradient this backward pass needs."""
        if not any(sink.wanted() for sink in self.sinks.values()):
            return
        given = inspect.BoundArguments(
            self.given.signature, OrderedDict(self.given.arguments)
        )
        first = next(iter(given.arguments))
        given.arguments.update({**found, first: delta})
        rows = self.rule(*given.args, **given.kwargs)
        if not isinstance(rows, Mapping):
            kind = type(rows).__name__
            raise RuntimeError(f"{self.where} returns {kind}, not a dictionary")
        for name, sink in self.sinks.items():
            expected = (len(delta), *self.shapes[name])
            there = tuple(rows[name].shape) if name in rows else "nothing"
            if there != expected:
                raise RuntimeError(
                    f"{self.where} returns {there} for {name!r}, not gradients of "
                    f"shape {expected}"
                )
            if sink.wanted():
                sink.put(self.axis.fold(rows[name]))


def _captured(rule: SampleRule) -> Callable[..., Value]:
    def run(trace: Trace, call: Call, *args: Value, **kwargs: Value) -> Value:
        out = call.func(*args, **kwargs)
        axis = next((a for t in call.batched if (a := trace.axis(t)) is not None), None)
        name = call.func.__name__
        if axis is None or axis.dim:
            problem = f"{name!r} has a rule for samples along the first dimension"
            raise trace.lost(problem, *call.derived)
        if not isinstance(out, Tensor) or not axis.fits(out.shape):
            problem = f"{name!r} does not return one tensor with a part of each sample"
            raise trace.lost(problem, *call.derived)
        if out.requires_grad:
            meeting = _Meeting.of(rule, trace, call, axis)
            out = apply(_Watched, out, [own(out)], meeting)
        trace.mark_axis(out, axis)
        return out

    return run


class _Watched(Function):
    """The identity; the gradient that passes by goes to the rule, too."""

    @staticmethod
    def forward(
        ctx: Context,
        out: Tensor,  # noqa: ARG004 (gets the gradient)
        value: list[Tensor],
        meeting: _Meeting,
    ) -> Tensor:
        # By autograd, which notices what is written in place before backward().
        found = meeting.take_tensors()
        ctx.save_for_backward(*found.values())
        ctx.meeting, ctx.names = meeting, tuple(found)
        return value[0]

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor, None, None]:
        meeting: _Meeting = ctx.meeting
        tensors = (t.detach() for t in ctx.saved_tensors)
        with torch.no_grad():
            meeting.put(delta, dict(zip(ctx.names, tensors, strict=True)))
        return delta, None, None
