"""The one rule about mixed samples: a tracked parameter does not meet them.

Once entries of several samples have come together, a parameter's row would hold parts
of other samples' terms of the loss. A mix that no tracked parameter meets afterwards is
part of the loss.
"""

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels, collapsed
from dome.samples.tracing.nested import Value, tensors, unpacked
from dome.samples.tracing.origins import Batched, Call, Place
from dome.samples.tracing.step import operations
from dome.samples.tracing.trace import Trace

ADDING = frozenset(
    operations(
        *("add", "sub", "subtract", "add_", "sub_", "rsub", "__add__", "__radd__"),
        *("__sub__", "__rsub__", "__iadd__", "__isub__"),
    )
)


def are_totals(trace: Trace, call: Call) -> bool:
    """Whether a penalty on the weights is added to a loss: it is no sample's part."""
    scalars = all(t.ndim == 0 for t in (*call.batched, *call.derived))
    totals = all(trace.place(t) is None for t in call.batched)
    return call.func in ADDING and scalars and totals


def admit(trace: Trace, call: Call) -> None:
    """Raise if a tracked parameter meets samples that were mixed."""
    for t in call.batched:
        origin = trace.origin(t)
        if not isinstance(origin, Batched):
            continue
        if origin.mixed is not None and not are_totals(trace, call):
            raise trace.mixes(origin.mixed, *call.derived)
        if origin.hidden is not None and not are_totals(trace, call):
            problem = f"{origin.hidden} has hidden which are whose in {tuple(t.shape)}"
            raise trace.lost(problem, *call.derived)
        if origin.doubt is not None:
            error = trace.mixes("indexing that joins several", *call.derived)
            trace.questions.raise_if(origin.doubt, error)
        if isinstance(origin.place, Labels):
            trace.met_by_number(*call.derived)
            nobody = trace.lost("some of its rows belong to no sample", *call.derived)
            trace.questions.raise_if((origin.place.ids < 0).any(), nobody)


def settled(
    trace: Trace, place: Place | None, end: int, *weights: Tensor | None
) -> Place | None:
    """A place whose samples change along the dimensions before ``end`` alone.

    None if they do not; by ids, that is a question to the device.
    """
    if isinstance(place, Axis):
        return place if place.dim < end else None
    if place is None or place.last < end:
        return place
    ids, several = collapsed(place.ids, tuple(range(end, place.ids.ndim)))
    error = trace.mixes("indexing that joins several", *weights)
    trace.questions.raise_if(several, error)
    return Labels(ids, place.batch)


def check_order(trace: Trace, output: Value) -> None:
    """Raise if the model's results are its samples in another order than they came.

    A row of the capture belongs to the sample that went in, a term of the loss to the
    place where it comes out.
    """
    if not trace.by_number:
        return
    for t in tensors(unpacked(output)):
        place = trace.place(t)
        if isinstance(place, Labels) and t.ndim and len(t) == place.batch:
            ids = place.ids.reshape(len(place.ids), -1)[:, 0].expand(place.batch)
            own = torch.arange(place.batch, device=ids.device)
            moved = (ids.sort().values == own).all() & (ids != own).any()
            problem = "its results are the samples in another order than they came"
            error = trace.lost(problem, *trace.by_number)
            trace.questions.raise_if(moved, error)
