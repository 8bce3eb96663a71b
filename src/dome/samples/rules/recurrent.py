"""Recurrent layers as explicit time loops, to the fused kernels' own equations.

The input projection of all time steps is one captured linear map. The hidden one is
applied step by step with the weight held constant, and its gradient is captured once
for the whole sequence: a tensor of zeros, added to what each step projects, receives
every step's δ in its backward, where one batched product makes the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import Function

from dome.samples.rules.broadcast import aligned
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
from dome.samples.rules.recording import recording
from dome.samples.store.sink import Site
from dome.samples.tracing.axis import Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call, Place
from dome.samples.tracing.refuse import settled
from dome.samples.tracing.trace import Trace
from dome.torch_private import fused


@recording
def lstm(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.lstm``."""
    if is_packed(args):
        return _packed(trace, call, lstm_step, args, tuple(args[2]))
    return _layers(trace, call, lstm_step, args, tuple(args[1]))


@recording
def gru(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.gru``."""
    if is_packed(args):
        return _packed(trace, call, gru_step, args, (args[2],))
    return _layers(trace, call, gru_step, args, (args[1],))


@recording
def rnn(trace: Trace, call: Call, *args: Value) -> tuple[Tensor, ...]:
    """``torch.rnn_tanh`` and ``torch.rnn_relu``."""
    step = relu_step if call.func == fused.rnn_relu else tanh_step
    if is_packed(args):
        return _packed(trace, call, step, args, (args[2],))
    return _layers(trace, call, step, args, (args[1],))


def _layers(
    trace: Trace, call: Call, step: Step, args: Sequence[Value], state: State
) -> tuple[Tensor, ...]:
    """Stacked, possibly bidirectional layers: (output, final states ...)."""
    x, _, weights, biases, layers, dropout, training, both_ways, batch_first = args
    place, batch_dim = trace.place(x), 0 if batch_first else 1
    if not _lies_along(place, batch_dim):
        problem = (
            f"a recurrent layer with batch_first={batch_first} of {tuple(x.shape)}, "
            f"not batched along dimension {batch_dim}"
        )
        raise trace.lost(problem, *call.derived)
    x = x.transpose(0, 1) if batch_first else x
    stack = _Stack(layers, dropout if training else 0.0, both_ways, biases)
    x, last = stack.run(trace, step, _columns(place), x, state, weights)
    results = [x.transpose(0, 1) if batch_first else x, *last]
    for t in results:
        trace.mark_axis(t, _columns(place))
    trace.mark_axis(results[0], place)
    return tuple(results)


def _lies_along(place: Place | None, dim: int) -> TypeGuard[Place]:
    if isinstance(place, Labels):
        return all(d == dim for d in place.dims)
    return place is not None and place.dim == dim


def _columns(place: Place) -> Place:
    """The same samples along dimension 1 of (T, N, H)."""
    if isinstance(place, Labels):
        return Labels(place.ids.reshape(1, -1, 1), place.batch)
    return place.moved(1)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Stacked, possibly bidirectional layers.

    Attributes:
        layers: How many.
        dropout: Share of the values dropped between layers, 0 in evaluation mode.
        both_ways: Each layer runs forwards and backwards in time.
        biases: The layers have biases.
    """

    layers: int
    dropout: float
    both_ways: bool
    biases: bool

    def run(
        self,
        trace: Trace,
        step: Step,
        place: Place,
        x: Tensor,
        state: State,
        weights: Sequence[Tensor],
        packed: "_Lengths | None" = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs (T, N, H) and final states of x (T, N, in)."""
        # A state that was learned, or computed of weights alone, is each sample's own.
        state = tuple(aligned(trace, s, x, place) for s in state)
        ways = 2 if self.both_ways else 1
        each = len(weights) // (self.layers * ways)
        active = None if packed is None else packed.active(x)
        finals: list[State] = []
        for layer in range(self.layers):
            outputs = []
            for way in range(ways):
                i = layer * ways + way
                own = _Weights.of(weights[i * each : (i + 1) * each], self.biases)
                start = tuple(s[i] for s in state)
                out, final = _run(
                    trace, step, place, x, start, own, backwards=way == 1, active=active
                )
                outputs.append(out)
                finals.append(final)
            x = torch.cat(outputs, -1) if self.both_ways else outputs[0]
            if self.dropout and layer < self.layers - 1:
                # Packed, so that it draws what the fused kernel draws.
                x = x if packed is None else packed.pack(x)
                x = torch.dropout(x, self.dropout, True)
                x = x if packed is None else packed.pad(x)
        return x, [torch.stack(states) for states in zip(*finals, strict=True)]


def is_packed(args: Sequence[Value]) -> bool:
    """Whether a fused kernel is called with a packed sequence."""
    return not isinstance(args[3], bool)


def _packed(
    trace: Trace, call: Call, step: Step, args: Sequence[Value], state: State
) -> tuple[Tensor, ...]:
    """Stacked layers over a packed sequence (N rows of all times, in)."""
    data, sizes, _, weights, biases, layers, dropout, training, both_ways = args
    place = settled(trace, trace.place(data), 1, *call.derived)
    if not isinstance(place, Labels):
        raise trace.lost("a packed sequence hides them", *call.derived)
    num = int(sizes[0])  # on the CPU, as torch keeps it
    columns = Labels(place.ids[:num].reshape(1, -1, 1), place.batch)
    lengths = _Lengths(sizes)
    stack = _Stack(layers, dropout if training else 0.0, both_ways, biases)
    x = lengths.pad(data)
    x, last = stack.run(trace, step, columns, x, state, weights, lengths)
    out = lengths.pack(x)
    trace.mark_axis(out, place)
    for t in last:
        trace.mark_axis(t, columns)
    return out, *last


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths of packed sequences: how many still run at each time, (T,)."""

    sizes: Tensor

    def pad(self, data: Tensor) -> Tensor:
        """Rows of a packed sequence as (T, N, in), zeros behind the shorter ones."""
        return fused._pad_packed_sequence(
            data, self.sizes, False, 0.0, len(self.sizes)
        )[0]

    def pack(self, x: Tensor) -> Tensor:
        """The rows of (T, N, in) that are not padding."""
        lengths = (self.sizes[:, None] > torch.arange(x.shape[1])).sum(0)
        return fused._pack_padded_sequence(x, lengths, False)[0]

    def active(self, x: Tensor) -> Tensor:
        """Which sequences of x (T, N, in) still run at each time, (T, N, 1)."""
        running = torch.arange(x.shape[1]) < self.sizes[:, None]
        return running.to(x.device, non_blocking=True)[..., None]


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
    axis: Place,
    x: Tensor,
    state: State,
    weights: _Weights,
    *,
    backwards: bool,
    active: Tensor | None,
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
        new = (h if shrink is None else shrink(h, t), *cell)
        if active is not None:
            # A sequence that has not begun, or is over, keeps its state.
            pairs = zip(new, state, strict=True)
            new = tuple(torch.where(active[t], a, b) for a, b in pairs)
        state = new
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
        cls, trace: Trace, axis: Place, x: Tensor, weight: Tensor, bias: Tensor | None
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
