"""Some of the samples of a model's input, in another order, the rest as it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dome.privacy.errors import PrivacyError
from dome.samples.tracing.inputs import Roles
from dome.samples.tracing.nested import all_tensors
from dome.torch_private import tree_flatten, tree_map_only

# A tensor, a number, a container of them: torch types it no closer.
Value = Any


class ModelInput:
    """What a model was called with.

    Args:
        model: Bags of its embeddings make samples of a pair (indices, offsets).
        value: Arguments and keyword arguments of the call.
        roles: Which of them hold samples.
        batch_dim: Which dimension of them enumerates samples.
    """

    def __init__(
        self, model: nn.Module, value: Value, roles: Roles, batch_dim: int
    ) -> None:
        self._value, self.samples_in = value, roles.declared
        leaves = tree_flatten(self._value)[0]
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(found) != len(all_tensors(self._value)):
            raise PrivacyError(
                "the model's input hides tensors in an object of its own, so that its "
                "samples cannot be taken apart to test whether the model mixes them: "
                "give the model tensors, tuples, lists or dictionaries of them"
            )
        self._bounds = _bounds(found, _bags(model))
        self._dims: dict[int, int] = {}
        if self._bounds is not None:
            self._offsets, self.size = found[1], len(self._bounds) - 1
            return
        named = roles.named(*value)
        self.size, places = roles.assigned(named, batch_dim)
        self._dims = {id(t): places[n].dim for n, t in named if n in places}

    def only(self, chosen: Sequence[int]) -> Value:
        """Arguments and keyword arguments with these samples, in copies."""
        select = self._selector(chosen)
        if self._bounds is not None:
            select = self._bag_selector(chosen, self._bounds)
        return tree_map_only(Tensor, select, self._value)

    def _selector(self, chosen: Sequence[int]) -> Callable[[Tensor], Tensor]:
        def select(t: Tensor) -> Tensor:
            dim = self._dims.get(id(t))
            if dim is None:
                return t.detach().clone()
            index = torch.tensor(chosen, device=t.device)
            return t.detach().index_select(dim, index)

        return select

    def _bag_selector(
        self, chosen: Sequence[int], bounds: list[int]
    ) -> Callable[[Tensor], Tensor]:
        pieces = [slice(bounds[i], bounds[i + 1]) for i in chosen]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + piece.stop - piece.start)

        def select(t: Tensor) -> Tensor:
            if t is self._offsets:
                last = len(t) == len(bounds)  # include_last_offset
                return t.new_tensor(starts if last else starts[:-1])
            if t.ndim == 1 and len(t) == bounds[-1]:  # indices, or weights of them
                return torch.cat([t.detach()[piece] for piece in pieces])
            return t.detach().clone()

        return select


class InputGuard:
    """Knows which inputs of a call hold samples, or refuses the call.

    A fixed input that is as long as the batch would be taken for samples, and the
    gradients of its entries for theirs: clipping these bounds nothing.

    Args:
        model: What is called.
        roles: Which inputs hold samples.
        batch_dim: Which dimension of them enumerates samples.
    """

    def __init__(self, model: nn.Module, roles: Roles, batch_dim: int) -> None:
        self._bags, self._roles = _bags(model), roles
        self.batch_dim = batch_dim

    def first(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Tensor:
        """The first input that holds samples; it tells which samples they are."""
        named = self._roles.named(args, kwargs)
        several = [(name, t) for name, t in named if t.ndim]
        if _bounds([t for _, t in named], self._bags) is not None or len(several) < 2:
            return named[0][1] if named else torch.zeros(0)
        if self._roles.declared is None:
            names = ", ".join(repr(name) for name, _ in several)
            raise PrivacyError(
                f"the model is called with several tensors, {names}, and which of them "
                f"hold samples cannot be told for certain: name them, "
                f"attach(..., samples_in=({several[0][0]!r},)); all others are taken "
                f"to be the same for all samples"
            )
        places = self._roles.assigned(named, self.batch_dim)[1]
        return dict(named)[next(iter(places))]


def _bags(model: nn.Module) -> list[nn.EmbeddingBag]:
    return [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]


def sample_dim(t: Tensor, size: int, batch_dim: int) -> int | None:
    """Where a tensor holds the samples; None for one that holds none (a mask, say)."""
    places = [dim for dim, length in enumerate(t.shape) if length == size]
    if batch_dim in places:
        return batch_dim
    return places[0] if len(places) == 1 else None


def _bounds(found: list[Tensor], bags: list[nn.EmbeddingBag]) -> list[int] | None:
    """Where bags begin and end, if a sample is a bag of indices."""
    pair = [t for t in found[:2] if t.ndim == 1 and not t.is_floating_point()]
    if not bags or len(pair) < 2:
        return None
    offsets = pair[1].tolist()
    return offsets if bags[0].include_last_offset else [*offsets, len(pair[0])]
