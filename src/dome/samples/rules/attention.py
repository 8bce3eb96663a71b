"""Multi-head attention: torch's own Python function, seen from the inside."""

from types import FunctionType

import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.trace import Trace


def _transparent(function: Value) -> FunctionType:
    """A copy that does not hand itself over to the mode as one opaque call."""
    inside = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, inside, function.__name__)
    copy.__defaults__ = function.__defaults__
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _transparent(F.multi_head_attention_forward)


def attention(trace: Trace, _: Call, *args: Value, **kwargs: Value) -> Value:
    """``F.multi_head_attention_forward``; its projections meet their own rules."""
    with trace.resume():
        return _multi_head_attention(*args, **kwargs)
