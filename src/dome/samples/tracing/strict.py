"""No mix at all: what differential privacy needs, where a sample must stay alone.

The sum or mean of the samples' losses is the one thing they may have in common. What is
computed outside the model is not seen.
"""

import torch
from torch import Tensor

from dome.samples.tracing.admission import ADDING
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value, tensors, unpacked
from dome.samples.tracing.origins import Batched, Call
from dome.samples.tracing.step import operations
from dome.samples.tracing.trace import Trace

_TOTALS = frozenset(
    operations(
        *("sum", "mean", "nansum", "cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
        *("binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"),
        *("ctc_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    )
)
_SCALING = frozenset(
    operations(
        *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "neg"),
        *("div", "div_", "__truediv__", "__itruediv__", "divide", "__neg__"),
        *("to", "float", "double", "clone", "contiguous", "view", "reshape", "squeeze"),
    )
)


def refuse_mix(trace: Trace, call: Call, out: Value) -> None:
    """Raise if a result that has a gradient is made of several samples."""
    for t in tensors(out):
        origin = trace.origin(t)
        if not isinstance(origin, Batched) or not t.requires_grad:
            continue
        how = origin.mixed or origin.hidden
        if how is not None and not _is_loss(trace, call, t):
            raise RuntimeError(mixed_in_strict(how))
        if origin.place is not None and origin.doubt is not None:
            error = RuntimeError(mixed_in_strict("indexing that joins several"))
            trace.questions.raise_if(origin.doubt, error)


def refuse_order(trace: Trace, output: Value) -> None:
    """Raise if a result of the model has one entry a sample, but not in its place."""
    for t in tensors(unpacked(output)):
        place = trace.place(t)
        if isinstance(place, Labels) and t.ndim and len(t) == place.batch:
            own = torch.arange(place.batch, device=t.device)
            own = own.view(-1, *(1,) * (t.ndim - 1))
            error = RuntimeError(mixed_in_strict("giving them back in another order"))
            trace.questions.raise_if((place.ids != own).any(), error)


def mixed_in_strict(how: str) -> str:
    """The sentence for a model that mixes samples where none may."""
    return (
        f"the model mixes the samples of a batch by {how}, which strict=True refuses "
        "(differential privacy needs every sample alone): take that part out"
    )


def _is_loss(trace: Trace, call: Call, t: Tensor) -> bool:
    """Whether a result is a sum of the samples' losses, scaled and shifted at most."""
    if t.ndim:
        return False
    if call.func in _TOTALS:
        return all(trace.place(x) is not None for x in call.batched)
    linear = call.func in _SCALING and len(call.batched) == 1
    return call.func in ADDING or linear
