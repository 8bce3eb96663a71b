"""Samples by number: which rule their ids follow an operation by.

Ids are numbers on the device. What comes together is in ``meeting``, what is picked and
placed in ``picking``, what is written to a tensor in ``writing``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.flow import einsum_operands, einsum_words
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.meeting import Found, contracted, met, multiplied
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Place
from dome.samples.tracing.picking import (
    gathered,
    indexed,
    joined,
    looked_up,
    masked,
    packed,
    repeated,
    reshaped_ids,
    selected,
    stacked,
    unpacked,
    viewed,
)
from dome.samples.tracing.step import (
    ALONG,
    ROLLING,
    SELECTING,
    SIZED,
    SORTING,
    SPLITTING,
    Step,
    operations,
)
from dome.samples.tracing.writing import WRITES, written
from dome.torch_private import fused


def has_rule(func: Callable[..., Value]) -> bool:
    """Whether ids have an exact rule of their own for this operation."""
    return func in WRITES or (func in _RULES and func not in _PRODUCTS)


def by_ids(step: Step) -> tuple[Place | None, Tensor | None]:
    """Where a result holds its samples, and whether entries of several have met."""
    batch = step.known[0][1].batch
    if step.func in WRITES:
        return written(step)
    ids, doubt = _RULES.get(step.func, met)(step)
    if ids is None or not _fits(ids, step.out):
        return None, doubt
    axis = _regular_partner(step)
    if axis is not None:
        return axis, doubt
    return Labels(ids, batch), doubt


def _fits(ids: Tensor, out: Tensor) -> bool:
    return ids.ndim == out.ndim and all(
        size in (1, full) for size, full in zip(ids.shape, out.shape, strict=True)
    )


def _regular_partner(step: Step) -> Axis | None:
    """The layout of a regular argument of the result's shape: it holds for the rest."""
    words = einsum_words(step.args) if step.func is torch.einsum else None
    if words is not None:
        *inputs, output = words
        for word, t in zip(inputs, einsum_operands(step.args), strict=True):
            axis = step.axes(t)
            if axis is not None and word[axis.dim] in output:
                return axis.moved(output.index(word[axis.dim]))
    if step.func in _RULES:
        return None
    for t, place in step.known:
        if isinstance(place, Axis) and t.shape == step.out.shape:
            return place
    return None


_PRODUCTS = frozenset(
    (*operations("matmul", "mm", "bmm", "__matmul__"), torch.sparse.mm)
)
_VIEWS = (
    *operations("transpose", "permute", "t", "adjoint", "movedim", "moveaxis"),
    *operations("swapaxes", "swapdims", "unsqueeze", "squeeze", "expand"),
    *operations("broadcast_to", "select", "narrow", "diagonal", "unfold", "unbind"),
    *(getattr(torch.Tensor, n).__get__ for n in ("T", "mT", "H", "mH")),
    *SIZED,
    *SPLITTING,
)
_RULES: dict[Callable[..., Value], Callable[[Step], Found]] = {
    **dict.fromkeys(_VIEWS, viewed),
    **dict.fromkeys(
        operations("view", "reshape", "flatten", "unflatten"), reshaped_ids
    ),
    **dict.fromkeys(operations("ravel", "view_as", "reshape_as"), reshaped_ids),
    **dict.fromkeys(operations("flip", "fliplr", "flipud"), selected),
    **dict.fromkeys((*ROLLING, *SORTING, *SELECTING), selected),
    **dict.fromkeys((*operations("gather"), *ALONG), gathered),
    **dict.fromkeys(operations("repeat_interleave"), repeated),
    **dict.fromkeys(operations("cat", "concat", "concatenate"), joined),
    **dict.fromkeys(operations("stack"), stacked),
    **dict.fromkeys(operations("embedding", "one_hot"), looked_up),
    **dict.fromkeys(_PRODUCTS, multiplied),
    **dict.fromkeys(operations("masked_select"), masked),
    torch.einsum: contracted,
    torch.Tensor.__getitem__: indexed,
    fused._pack_padded_sequence: packed,
    fused._pad_packed_sequence: unpacked,
}
