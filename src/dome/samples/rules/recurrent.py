"""Recurrent layers as explicit time loops, to the fused kernels' own equations.

The input projection of all time steps is one captured linear map. The hidden one is
applied step by step with the weight held constant, and its gradient is captured once
for the whole sequence: a tensor of zeros, added to what each step projects, receives
every step's δ in its backward, where one batched product makes the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.cell import (
    State,
    Step,
    gru_step,
    lstm_step,
    relu_step,
    tanh_step,
)
from dome.samples.rules.function import Context, apply, first_order
from dome.samples.rules.linear import linear_along, weight_gradient
from dome.samples.rules.site import Site
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value
from dome.samples.tracing.trace import Call, Trace
from dome.torch_private import fused


def lstm(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.lstm`` of padded input."""
    return _layers(trace, call, lstm_step, args, tuple(args[1]))


def gru(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.gru`` of padded input."""
    return _layers(trace, call, gru_step, args, (args[1],))


def rnn(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.rnn_tanh`` and ``torch.rnn_relu`` of padded input."""
    step = relu_step if call.func == fused.rnn_relu else tanh_step
    return _layers(trace, call, step, args, (args[1],))


def _layers(
    trace: Trace, call: Call, step: Step, args: Sequence[Value], state: State
) -> tuple[Tensor, ...]:
    """Stacked, possibly bidirectional layers: (output, final states ...)."""
    if not isinstance(args[3], bool):
        raise trace.lost("a packed sequence holds them", *call.derived)
    x, _, weights, biases, layers, dropout, training, both_ways, batch_first = args
    axis, batch_dim = trace.axis(x), 0 if batch_first else 1
    if axis is None or axis.dim != batch_dim:
        problem = (
            f"a recurrent layer with batch_first={batch_first} of {tuple(x.shape)}, "
            f"not batched along dimension {batch_dim}"
        )
        raise trace.lost(problem, *call.derived)
    x, axis = (x.transpose(0, 1) if batch_first else x), axis.moved(1)
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    finals: list[State] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            i = layer * ways + way
            own = _Weights.of(weights[i * each : (i + 1) * each], biases)
            start = tuple(s[i] for s in state)
            out, final = _run(trace, step, axis, x, start, own, backwards=way == 1)
            outputs.append(out)
            finals.append(final)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    last = [torch.stack(states) for states in zip(*finals, strict=True)]
    results = [x.transpose(0, 1) if batch_first else x, *last]
    results = _as_autocast(call, results, args, state)
    for t in results:
        trace.mark_axis(t, axis)
    trace.mark_axis(results[0], axis.moved(batch_dim))
    return tuple(results)


def _as_autocast(
    call: Call, results: list[Tensor], args: Sequence[Value], state: State
) -> list[Tensor]:
    """Under autocast, the results in the types of the fused kernel's, of one sample."""
    x, rest = args[0], args[2:]
    if not torch.is_autocast_enabled(x.device.type):
        return results
    first = tuple(s[:, :1] for s in state)
    with torch.no_grad():
        fused = call.func(x[:1, :1], first if len(state) > 1 else first[0], *rest)
    return [t.to(f.dtype) for t, f in zip(results, fused, strict=True)]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one direction of one layer."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: bool) -> "_Weights":
        """From torch's list: two weights, two biases if any, an LSTM's projection."""
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest[:2] if biases else (None, None)
        rest = rest[2:] if biases else rest
        return cls(w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None)


def _run(
    trace: Trace,
    step: Step,
    axis: Axis,
    x: Tensor,
    state: State,
    weights: _Weights,
    backwards: bool,
) -> tuple[Tensor, State]:
    """One direction of one layer over x (T, N, in): outputs (T, N, H), final state."""
    projected = linear_along(trace, axis, x, weights.w_ih, weights.b_ih)
    hidden = _Repeated.on(trace, axis, x, weights.w_hh, weights.b_hh)
    shrink = (
        _Repeated.on(trace, axis, x, weights.w_hr, None)
        if weights.w_hr is not None
        else None
    )
    outputs: list[Tensor] = []
    times = range(len(x))
    inputs = projected.unbind(0)
    for t in reversed(times) if backwards else times:
        h, *cell = step(inputs[t], hidden(state[0], t), state)
        state = (h if shrink is None else shrink(h, t), *cell)
        outputs.append(state[0])
    out = torch.stack(outputs[::-1] if backwards else outputs)
    trace.mark_axis(out, axis)
    return out, state


class _Repeated:
    """A linear map applied once a time step, captured once for all of them."""

    def __init__(
        self, injected: Tensor, weight: Tensor, bias: Tensor | None, seen: "_Seen"
    ) -> None:
        self._injected = injected.unbind(0)
        self._weight = weight.detach().T
        self._bias = None if bias is None else bias.detach()
        self._seen = seen

    @classmethod
    def on(
        cls, trace: Trace, axis: Axis, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> "_Repeated":
        """For the time steps and samples of x (T, N, in)."""
        seen = _Seen(Site(axis, trace.sink(weight), trace.sink(bias)))
        shape = (*x.shape[:2], len(weight))
        return cls(apply(_Injected, weight, bias, seen, shape), weight, bias, seen)

    def __call__(self, h: Tensor, t: int) -> Tensor:
        """The map of h (N, in) at time t."""
        self._seen.inputs[t] = h.detach()
        out = h @ self._weight + self._injected[t]
        return out if self._bias is None else out + self._bias


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the map was applied to, by time step."""

    site: Site
    inputs: dict[int, Tensor] = field(default_factory=dict)


class _Injected(Function):
    @staticmethod
    def forward(
        ctx: Context,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004 (gets a gradient)
        seen: _Seen,
        shape: tuple[int, ...],
    ) -> Tensor:
        ctx.seen = seen
        return weight.new_zeros(shape)

    @staticmethod
    @first_order
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        seen: _Seen = ctx.seen
        site = seen.site
        d = site.axis.samples_first(delta)
        dw = db = None
        if ctx.needs_input_grad[0] and site.wants_weight():
            inputs = torch.stack([seen.inputs[t] for t in range(len(delta))])
            a = site.axis.samples_first(inputs)
            dw = weight_gradient(site, d, a)
        if ctx.needs_input_grad[1] and site.wants_bias():
            db = site.bias_total(d.sum(1))
        return dw, db, None, None
