"""``masked_scatter``: entries of a weight put into samples, one after the other.

The n-th entry of the source goes to the n-th place that the mask names, counted through
the whole batch: images of all samples to their places in the sentences. So it is a look
up by number,

    out = where(mask, source[rank], x),    rank = (places before it in the mask)

and a sample's gradient is that of the entries at its own places.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from dome.samples.rules.fallback import fallback
from dome.samples.rules.recording import recording
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.trace import Trace


@recording
def masked_scatter(
    trace: Trace,
    call: Call,
    input: Tensor,  # noqa: A002 (torch's own name)
    mask: Tensor,
    source: Tensor,
) -> Value:
    """``x.masked_scatter(mask, source)`` of samples x (..., E) and a weight."""
    x, place = input, trace.place(input)
    if place is None or trace.sink(source) is None:
        return fallback(trace, call, *call.args, **call.kwargs)
    mask = mask.expand(x.shape)
    # Whole rows of the source, if the mask is the same along the last dimension.
    whole = isinstance(place, Axis) and place.dim < x.ndim - 1 and mask.stride(-1) == 0
    width = x.shape[-1] if whole else 1
    named = mask[..., 0] if whole else mask
    rank = named.flatten().cumsum(0).sub(1).clamp(min=0).view(named.shape)
    trace.mark_axis(rank, place)
    with trace.resume():
        # It may be longer than the mask asks for.
        table = source.flatten()[: source.numel() // width * width].view(-1, width)
        picked = F.embedding(rank, table).view(x.shape)
        out = torch.where(mask, picked, x)
        return x.copy_(out) if call.in_place else out
