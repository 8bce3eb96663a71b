"""How ids follow operations that pick and place entries: the same is done to them."""

import torch
from torch import Tensor

from dome.samples.tracing.dims import acts_along
from dome.samples.tracing.labels import NOBODY, compact, reshaped
from dome.samples.tracing.meeting import Found, met
from dome.samples.tracing.nested import Value, tensors
from dome.samples.tracing.step import ALONG, SELECTING, SORTING, Step


def viewed(step: Step) -> Found:
    """Views: of the ids as of the tensor."""
    ids = _own(step)
    if ids is None:
        return None, None
    plain = {k: v for k, v in step.kwargs.items() if k != "dtype"}
    result = step.func(ids, *step.args[1:], **plain)
    return compact(tensors(result)[step.number]), None


def reshaped_ids(step: Step) -> Found:
    """Reshapes, of which a few numbers stand for all."""
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return None, None
    return reshaped(ids, tuple(x.shape), tuple(step.out.shape)), None


def selected(step: Step) -> Found:
    """Flips, rolls and selections along one dimension."""
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return _from_the_index(step)
    if step.func in SORTING:
        return _sorted(step, ids)
    if step.func in SELECTING:
        dim = step.argument(1, "dim")
        if ids.shape[dim % x.ndim] == 1:
            return ids, None
        return ids.index_select(dim, step.argument(2, "index")), None
    return compact(step.func(ids.expand(x.shape), *step.args[1:], **step.kwargs)), None


def _sorted(step: Step, ids: Tensor) -> Found:
    x = step.args[0]
    (dim,) = acts_along(step.func, step.args, step.kwargs, x) or (x.ndim - 1,)
    order = step.result if isinstance(step.result, Tensor) else step.result[1]
    if ids.shape[dim] == 1:
        return ids, None
    return ids.expand(x.shape).gather(dim, order), None


def gathered(step: Step) -> Found:
    """``gather`` and ``take_along_dim``."""
    x, dim, index = step.args[0], step.argument(1, "dim"), step.argument(2, "index")
    if step.func in ALONG:
        index, dim = step.argument(1, "indices"), step.argument(2, "dim")
    ids = step.ids(x)
    if ids is None or dim is None:
        return _from_the_index(step)
    dim %= x.ndim
    if ids.shape[dim] == 1:
        return _narrowed(ids, index), None
    # Where neither ids nor index change, one entry stands for all.
    for d in range(x.ndim):
        if d != dim and ids.shape[d] == 1 and index.stride(d) == 0:
            index = index.narrow(d, 0, 1)
    sizes = list(map(max, ids.shape, index.shape))
    sizes[dim] = x.shape[dim]
    return ids.expand(sizes).gather(dim, index), None


def _narrowed(ids: Tensor, index: Tensor) -> Tensor:
    for d, size in enumerate(index.shape):
        if ids.shape[d] > size:
            ids = ids.narrow(d, 0, size)
    return ids


def indexed(step: Step) -> Found:
    """``x[index]``."""
    x, index = step.args[0], step.args[1]
    ids = step.ids(x)
    if ids is None:
        return _from_the_index(step)
    index = _spelled_out(index if isinstance(index, tuple) else (index,), x.ndim)
    own, dim = [], 0
    for i in index:
        width = 0 if i is None else i.ndim if _is_mask(i) else 1
        if _is_mask(i) or isinstance(i, list):
            sizes = list(ids.shape)
            sizes[dim : dim + width] = x.shape[dim : dim + width]
            ids = ids.expand(sizes)
            own.append(i)
        elif width and ids.shape[dim] == 1:
            own.append(_of_one(i))
        else:
            own.append(i)
        dim += width
    return ids[tuple(own)], None


def _spelled_out(index: tuple[Value, ...], ndim: int) -> tuple[Value, ...]:
    """An index with a slice for every dimension that it leaves alone."""
    taken = sum(
        i.ndim if _is_mask(i) else 1 for i in index if i is not None and i is not ...
    )
    rest = (slice(None),) * (ndim - taken)
    for place, i in enumerate(index):
        if i is ...:
            return index[:place] + rest + index[place + 1 :]
    return index + rest


def _is_mask(i: Value) -> bool:
    return isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)


def _of_one(i: Value) -> Value:
    """An index into a dimension of which one entry stands for all."""
    if isinstance(i, slice):
        return slice(None)
    return torch.zeros_like(i) if isinstance(i, Tensor) else 0


def masked(step: Step) -> Found:
    """``masked_select``: entries one after the other."""
    ids = _own(step)
    if ids is None:
        return None, None
    ids, mask = torch.broadcast_tensors(ids, step.argument(1, "mask"))
    return ids[mask], None


def _from_the_index(step: Step) -> Found:
    """A table that is no sample's, looked up at the samples' indices."""
    index = step.args[1] if step.func is torch.Tensor.__getitem__ else None
    if step.func in SELECTING and step.argument(1, "dim") == 0:
        index = step.argument(2, "index")
    ids = step.ids(index)
    if ids is None or _is_mask(index):
        return None, None
    return ids.view(ids.shape + (1,) * (step.out.ndim - ids.ndim)), None


def looked_up(step: Step) -> Found:
    """Rows of a table, and one-hot vectors."""
    ids = step.ids(step.argument(0, "input"))
    return (None if ids is None else ids.unsqueeze(-1)), None


def repeated(step: Step) -> Found:
    """``repeat_interleave``."""
    x, dim = step.args[0], step.argument(2, "dim")
    ids = step.ids(x)
    if ids is None or dim is None:
        return None, None
    if ids.shape[dim % x.ndim] == 1:
        return ids, None
    repeats, total = step.argument(1, "repeats"), step.out.shape[dim]
    return ids.repeat_interleave(repeats, dim, output_size=total), None


def joined(step: Step) -> Found:
    """``cat`` along the samples, or of parts that all hold them elsewhere."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim", "axis") or 0
    dim %= step.out.ndim
    own = [step.ids(t) for t in parts]
    flat = all(ids is None or ids.shape[dim] == 1 for ids in own)
    if flat and not _are_alone([ids for ids in own if ids is not None]):
        return met(step)
    pieces = []
    for t, ids in zip(parts, own, strict=True):
        piece = _nobody(t) if ids is None else ids
        sizes = [t.shape[d] if d == dim else n for d, n in enumerate(piece.shape)]
        pieces.append(piece.expand(sizes))
    return _concatenated(pieces, dim), None


def _are_alone(ids: list[Tensor]) -> bool:
    """Whether parts are one sample's each, and of several as far as one can see."""
    if any(one.numel() > 1 for one in ids):
        return False
    return any(one.device.type != "cpu" or int(one) != int(ids[0]) for one in ids)


def stacked(step: Step) -> Found:
    """``stack``: parts side by side in a dimension of their own."""
    parts, dim = step.argument(0, "tensors"), step.argument(1, "dim") or 0
    dim %= step.out.ndim
    own = [step.ids(t) for t in parts]
    pieces = [
        (_nobody(t) if ids is None else ids).unsqueeze(dim)
        for t, ids in zip(parts, own, strict=True)
    ]
    return _concatenated(pieces, dim), None


def _nobody(t: Tensor) -> Tensor:
    return torch.full((1,) * t.ndim, NOBODY, device=t.device)


def _concatenated(pieces: list[Tensor], dim: int) -> Tensor:
    """Ids side by side along a dimension, along the others as large as the largest."""
    sizes = [max(p.shape[d] for p in pieces) for d in range(pieces[0].ndim)]
    wide = []
    for piece in pieces:
        sizes[dim] = piece.shape[dim]
        wide.append(piece.expand(sizes))
    return torch.cat(wide, dim)


def packed(step: Step) -> Found:
    """Rows of a packed sequence; of the lengths that come with it, nothing."""
    if step.number:
        return None, None
    x = step.args[0]
    ids = step.ids(x)
    if ids is None:
        return None, None
    wide = ids.expand(*x.shape[:2], *ids.shape[2:]).contiguous()
    data, _ = step.func(wide, *step.args[1:], **step.kwargs)
    return data, None


def unpacked(step: Step) -> Found:
    """A padded batch: what pads a sample is the sample's."""
    data, sizes = step.args[:2]
    ids = step.ids(data)
    if ids is None or step.number:
        return None, None
    first = ids[: int(sizes[0])]
    batch_first = step.argument(2, "batch_first")
    return (first.unsqueeze(1) if batch_first else first.unsqueeze(0)), None


def _own(step: Step) -> Tensor | None:
    """The ids of the first argument, of its own shape without a copy."""
    x = step.args[0]
    ids = step.ids(x)
    return None if ids is None else ids.expand(x.shape)
