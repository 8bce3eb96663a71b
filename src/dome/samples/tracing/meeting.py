"""How ids follow operations in which entries come together: sums, products, pairs.

Two ids for one entry are a doubt, a boolean that stays on the device until a parameter
meets the entry.
"""

from torch import Tensor

from dome.samples.tracing.dims import acts_along
from dome.samples.tracing.flow import einsum_operands, einsum_words
from dome.samples.tracing.labels import collapsed, either, merged
from dome.samples.tracing.step import Step

Found = tuple[Tensor | None, Tensor | None]  # ids and doubt


def met(step: Step) -> Found:
    """Entries of all arguments, lined up from the right, then brought together."""
    ndim = max(t.ndim for t, _ in step.known)
    ids, doubt = None, None
    for t, _ in step.known:
        own = step.ids(t)
        if own is None:
            continue
        own = own.view((1,) * (ndim - own.ndim) + own.shape)
        if ids is None or ids is own:
            ids = own
        elif _broadcast(ids, own):
            ids, clash = merged(ids, own)
            doubt = either(doubt, clash)
        else:
            return None, doubt
    if ids is None:
        return None, None
    dims = acts_along(step.func, step.args, step.kwargs, step.x)
    if step.x.ndim != ndim:
        dims = tuple(d + ndim - step.x.ndim for d in dims)
    ids, several = collapsed(ids, dims)
    if step.out.ndim == ids.ndim - len(dims):
        ids = ids.reshape([n for d, n in enumerate(ids.shape) if d not in dims])
    return ids, either(doubt, several)


def _broadcast(a: Tensor, b: Tensor) -> bool:
    pairs = zip(a.shape, b.shape, strict=True)
    return all(1 in pair or pair[0] == pair[1] for pair in pairs)


def multiplied(step: Step) -> Found:
    """``matmul``: rows of the first meet columns of the second."""
    a, b = step.args[:2]
    if min(a.ndim, b.ndim) < 2:
        return None, None
    found = []
    doubt = None
    for t, dim in ((a, -1), (b, -2)):
        ids = step.ids(t)
        if ids is not None:
            ids, several = collapsed(ids, (dim % t.ndim,))
            doubt = either(doubt, several)
            found.append(ids.view((1,) * (step.out.ndim - ids.ndim) + ids.shape))
    if len(found) == 1:
        return found[0], doubt
    ids, clash = merged(*found)
    return ids, either(doubt, clash)


def contracted(step: Step) -> Found:
    """``einsum``: entries that are summed over must be one sample's."""
    words = einsum_words(step.args)
    if words is None:
        return None, None
    *inputs, output = words
    found, doubt = None, None
    for word, t in zip(inputs, einsum_operands(step.args), strict=True):
        ids = step.ids(t)
        if ids is None or len(set(word)) < len(word):
            continue
        summed = tuple(d for d, letter in enumerate(word) if letter not in output)
        ids, several = collapsed(ids, summed)
        kept = [letter for letter in output if letter in word]
        order = [*(word.index(letter) for letter in kept), *summed]
        ids = ids.permute(order).reshape([ids.shape[word.index(k)] for k in kept])
        ids = ids.view([ids.shape[kept.index(k)] if k in kept else 1 for k in output])
        clash: Tensor | None = None
        if found is not None:
            ids, clash = merged(found, ids)
        found, doubt = ids, either(doubt, several, clash)
    return found, doubt
