"""One step of a recurrent layer, to the fused kernels' own equations.

Shapes: N rows of a batch, H hidden units.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from dome.samples.rules.broadcast import aligned
from dome.samples.rules.linear import linear_along
from dome.samples.rules.recording import recording
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.refuse import settled
from dome.samples.tracing.trace import Trace
from dome.torch_private import fused

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def lstm_step(x: Tensor, h: Tensor, state: State) -> State:
    """New (hidden, cell) from the projected input and hidden state, (N, 4H) each."""
    i, f, g, o = (x + h).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(x: Tensor, h: Tensor, state: State) -> State:
    """New (hidden,) from the projected input and hidden state, (N, 3H) each."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z = (xz + hz).sigmoid()
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + z * (state[0] - n),)


def tanh_step(x: Tensor, h: Tensor, _: State) -> State:
    """New (hidden,) of a plain recurrent layer."""
    return ((x + h).tanh(),)


def relu_step(x: Tensor, h: Tensor, _: State) -> State:
    """New (hidden,) of a plain recurrent layer with ReLU."""
    return ((x + h).relu(),)


@recording
def lstm_cell(
    trace: Trace, call: Call, x: Tensor, state: Value, *weights: Value
) -> State:
    """``torch.lstm_cell``."""
    return _cell(trace, call, lstm_step, x, tuple(state), weights)


@recording
def gru_cell(trace: Trace, call: Call, x: Tensor, h: Tensor, *weights: Value) -> Tensor:
    """``torch.gru_cell``."""
    return _cell(trace, call, gru_step, x, (h,), weights)[0]


@recording
def rnn_cell(trace: Trace, call: Call, x: Tensor, h: Tensor, *weights: Value) -> Tensor:
    """``torch.rnn_tanh_cell`` and ``torch.rnn_relu_cell``."""
    step = relu_step if call.func == fused.rnn_relu_cell else tanh_step
    return _cell(trace, call, step, x, (h,), weights)[0]


def _cell(
    trace: Trace,
    call: Call,
    step: Step,
    x: Tensor,
    state: State,
    weights: Sequence[Value],
) -> State:
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    axis = settled(trace, trace.place(x), 1, *call.derived)
    if axis is None:
        raise trace.lost(f"a recurrent cell of {tuple(x.shape)}", *call.derived)
    state = tuple(aligned(trace, s, x, axis) for s in state)
    new = step(
        linear_along(trace, axis, x, w_ih, b_ih),
        linear_along(trace, axis, state[0], w_hh, b_hh),
        state,
    )
    for t in new:
        trace.mark_axis(t, axis)
    return new
