"""A step is taken with the batch that was drawn: all of its samples, and no others.

What may be done to a batch before the model sees it: nothing that makes other numbers
of its samples. They may be moved, cast, reshaped, put in another order and given to the
model in parts. Everything else has its place in the data set, where it concerns one
sample by construction, in the collation, or in the model, whose samples are tested for
independence.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from dome.privacy.accounting import Budget, PrivacyError
from dome.privacy.refuse import check_products
from dome.privacy.sampling import WHOLE, Marks, digest, marked, sample_digests
from dome.samples.store.gradients import Leaves, Reach
from dome.samples.tracing.nested import Value, all_tensors
from dome.torch_private import current_graph_task


class Forward:
    """One call of the model, and the backward passes that came through its outputs.

    Args:
        inputs: Arguments and keyword arguments.
        first: The first input tensor that holds samples.
        batch_dim: Which dimension of it enumerates samples.

    Attributes:
        inputs: As given.
        passes: Numbers of output tensors that gradients came through, by the pass.
        dtype: Of the first input tensor that holds samples.
        samples: Its samples' digests.
        whole: Its digest, where samples do not lie along a dimension.
    """

    def __init__(self, inputs: Value, first: Tensor, batch_dim: int) -> None:
        self.inputs, self.dtype = inputs, first.dtype
        self.passes: dict[int, set[int]] = {}
        self.whole, self.samples = [digest(first)], list[int]()
        if first.ndim > batch_dim:
            self.samples = sample_digests(first, batch_dim)

    @property
    def reached(self) -> set[int]:
        """Numbers of all output tensors that gradients came through."""
        return set().union(*self.passes.values())


class Drawn:
    """A batch of the loader that waits for its step.

    Args:
        marks: What it was when it was made.
        batch: What was handed out.
    """

    def __init__(self, marks: Marks, batch: object) -> None:
        self.size, self._marks = marks.size, marks
        self._tensors = all_tensors(batch)

    def is_all_of(self, used: list[Forward]) -> bool:
        """Whether these calls together had all of the samples, each of them once.

        Calls of one backward pass, with as many samples, add to the same rows: there
        they must have the same samples in the same order.
        """
        free = set(range(self.size))
        rows: dict[tuple[int, int], list[int]] = {}
        for call in used:
            keys = [(number, len(call.samples)) for number in call.passes]
            shared = [rows[key] for key in keys if key in rows]
            places = shared[0] if shared else self._places(call, free)
            if not places or (shared and not self._had(call, places)):
                return False
            if any(rows.setdefault(key, places) != places for key in keys):
                return False
            free -= set(places)
        return not free

    def _places(self, call: Forward, free: set[int]) -> list[int]:
        """Which samples of the batch a call had, in its order; none if others."""
        for dim, digests in self._digests(call.dtype):
            if dim == WHOLE and digests == call.whole:
                return sorted(free)
            found = _found(call.samples, digests, free) if dim != WHOLE else None
            if found is not None:
                return found
        return []

    def _had(self, call: Forward, places: list[int]) -> bool:
        """Whether a call had these samples, in this order."""
        return any(
            digests == call.whole
            if dim == WHOLE
            else [digests[place] for place in places] == call.samples
            for dim, digests in self._digests(call.dtype)
        )

    def _digests(self, dtype: torch.dtype) -> Iterator[tuple[int, list[int]]]:
        """Digests of every tensor as it was, and as a cast would have rounded it."""
        for t, marks in zip(self._tensors, self._marks.digests, strict=True):
            for dim, digests in marks.items():
                yield dim, digests
                # The batch itself must still be what it was.
                if t.dtype != dtype and marked(t, dim) == digests:
                    yield dim, marked(t.to(dtype), dim)


def _found(samples: list[int], among: list[int], free: set[int]) -> list[int] | None:
    """A place for each of these numbers, first ones first, if all are there."""
    places = defaultdict[int, list[int]](list)
    for place in sorted(free, reverse=True):
        places[among[place]].append(place)
    found = [places[number].pop() for number in samples if places[number]]
    return found if len(found) == len(samples) else None


class BatchGuard:
    """Knows which batch waits for its step, and which calls of the model had it.

    Args:
        budget: Pays for a batch that no step was taken with.
        parameters: The trainable ones: without any gradient, earlier calls are void.
    """

    def __init__(self, budget: Budget, parameters: tuple[nn.Parameter, ...]) -> None:
        self._budget, self._parameters = budget, parameters
        self._waiting: Drawn | None = None
        self._calls: list[Forward] = []
        self._leaves = Leaves(parameters)

    @property
    def is_waiting(self) -> bool:
        """Whether a batch was drawn that no step has been taken with."""
        return self._waiting is not None

    def check_none_waits(self) -> None:
        """Refuse public changes while a private batch waits."""
        if self.is_waiting:
            raise PrivacyError(
                "a private batch waits for its step, and changes made now could "
                "depend on it: take the step first"
            )

    def draw(self, marks: Marks, batch: object) -> None:
        """Note a batch that is handed out; the one before must have had its step."""
        if self._waiting is not None:
            self.done()
            self._budget.spend()
            raise PrivacyError(
                "a batch was drawn and no step was taken with it: whether a step is "
                "taken would reveal something about its samples. Call "
                "optimizer.step() for every batch, also for an empty one. The batch "
                "is counted as a step, and the next one can be drawn"
            )
        self._budget.check_left()
        self._waiting = Drawn(marks, batch)

    def saw(self, call: Forward) -> None:
        """Note a call of the model."""
        if any(earlier.passes for earlier in self._calls) and not any(
            p.grad is not None and bool(p.grad.any()) for p in self._parameters
        ):
            self._calls.clear()  # zero_grad() threw away what came of them
        self._calls.append(call)

    def follow(self, call: Forward, output: object) -> None:
        """Notice the backward passes that come through what a call returned."""
        for number, t in enumerate(all_tensors(output)):
            if t.grad_fn is not None:
                t.register_hook(partial(self._reach, call, number))

    def _reach(self, call: Forward, number: int, _: Tensor) -> None:
        trained = (p for p in self._parameters if p.requires_grad)
        # autograd.grad() leaves ``.grad`` alone.
        if any(self._leaves.reach(p) is Reach.FILLS for p in trained):
            check_products(self._parameters[0].device)
            call.passes.setdefault(current_graph_task(), set()).add(number)

    def waiting(self) -> Drawn:
        """The batch of this step; it stays until ``done``."""
        if self._waiting is None:
            raise PrivacyError(
                "optimizer.step() was called without a new batch: every step takes "
                "one batch from .loader(dataset), because the accountant assumes "
                "Poisson sampling. A closure that is called twice, or a step outside "
                "the loop, would release a batch again without counting it"
            )
        return self._waiting

    def used(self) -> list[Forward]:
        """The calls that the gradient of this step came from, all of this batch."""
        drawn = self.waiting()
        used = [call for call in self._calls if call.passes]
        if drawn.size and not drawn.is_all_of(used):
            raise PrivacyError(
                "the gradient is not that of all samples of this batch, each once: "
                "pass a tensor of the batch to the model as its first tensor, as it "
                "came from .loader(dataset), and compute the loss from what the model "
                "returns. You may move, cast, reshape and reorder it. What makes "
                "other numbers (normalising, augmenting, mixing) belongs into the "
                "data set, the collate_fn or the model"
            )
        return used

    def done(self) -> None:
        """Forget the batch: its step is paid for."""
        self._waiting = None
        self._calls.clear()
