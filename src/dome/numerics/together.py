"""What several updates need from outside is asked together, once.

An update is a generator. Where it needs something that is dear to ask for one by one,
it yields a request and is sent the answer: a sum over workers, a factorisation of small
matrices, or numbers to decide by, which make the device finish its queue. ``together``
runs any number of updates side by side: sums travel as one, matrices of one shape are
factored as a batch, and the device is asked when nobody can go on without it.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dome.numerics.arithmetic import own_arithmetic
from dome.numerics.shard import Total

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    """Small tensors to be added up over the workers that hold the other rows."""

    total: Total
    tensors: tuple[Tensor, ...]

    @property
    def kind(self) -> object:
        """Requests of one kind are answered together."""
        return Sum

    def answers(self, requests: Sequence["Sum"]) -> list[tuple[Tensor, ...]]:
        """The sums of several requests, in one message."""
        if len(requests) == 1:
            return [self.total(*self.tensors)]
        flat = iter(self.total(*(t for r in requests for t in r.tensors)))
        return [tuple(next(flat) for _ in r.tensors) for r in requests]


@dataclass(frozen=True, slots=True)
class Small:
    """A function of small matrices (..., n, m) that takes batches of them.

    Attributes:
        function: Gives a tuple of tensors, each with the batch's dimensions in front.
        matrices: What it is given.
        options: What it is given besides: the same for a whole batch.
    """

    function: Callable[..., tuple[Tensor, ...]]
    matrices: tuple[Tensor, ...]
    options: tuple[object, ...] = ()

    @property
    def kind(self) -> object:
        """Requests of one kind are answered together."""
        shapes = [(m.shape, m.dtype) for m in self.matrices]
        return self.function, self.options, tuple(shapes)

    def answers(self, requests: Sequence["Small"]) -> list[tuple[Tensor, ...]]:
        """The results of several requests, on an accelerator as one batch."""
        # Eigenvectors wait for the device, once for all of a kind: torch reads whether
        # eigh has converged, and has no public way to leave that to later.
        # On a CPU a batch rounds in an order of its own: a layer would not get the bits
        # that it gets alone, as it is when samples are streamed.
        if len(requests) == 1 or self.matrices[0].device.type == "cpu":
            return [r.function(*r.matrices, *r.options) for r in requests]
        columns = zip(*(request.matrices for request in requests), strict=True)
        stacked = [torch.stack(column) for column in columns]
        results = self.function(*stacked, *self.options)
        return list(zip(*(result.unbind() for result in results), strict=True))


@dataclass(frozen=True, slots=True)
class Ask:
    """Scalars to decide by: the answer is a list of numbers."""

    scalars: tuple[Tensor, ...]

    @property
    def kind(self) -> object:
        """Requests of one kind are answered together."""
        return Ask

    def answers(self, requests: Sequence["Ask"]) -> list[list[float]]:
        """The numbers of several requests, read at once."""
        scalars = [s.to(torch.float64) for r in requests for s in r.scalars]
        # Here a tracker waits for its device: what Python does next depends on
        # whether the samples are finite and what became of the basis.
        flat = iter(torch.stack(scalars).tolist())
        return [[next(flat) for _ in request.scalars] for request in requests]


IsTrue = Callable[[Tensor], bool]  # what is to be believed of a condition, a scalar


def looked_up(condition: Tensor) -> bool:
    """What a condition is: the device is asked at once."""
    return bool(condition)


class Assumed:
    """Takes conditions that nearly always hold for true, to be asked about together.

    What is computed on such terms is thrown away where one of them did not hold.
    """

    def __init__(self) -> None:
        self._conditions: list[Tensor] = []

    def __call__(self, condition: Tensor) -> bool:
        """True for now."""
        self._conditions.append(condition)
        return True

    def was_right(self) -> tuple[Tensor, ...]:
        """Whether each of them holds, scalars."""
        return tuple(self._conditions)


Request = Sum | Small | Ask
Steps = Generator[Request, Any, T]


@own_arithmetic
def together(updates: Iterable[Steps[T]]) -> list[T]:
    """Run updates side by side; what each of them returned."""
    running = dict(enumerate(updates))
    results: dict[int, T] = {}
    waiting: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(running)
    while answers:
        for number, answer in answers.items():
            try:
                waiting[number] = running[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
        if len(waiting) == 1:
            number, request = waiting.popitem()
            answers = {number: request.answers([request])[0]}
            continue
        # The device is asked when nobody can go on without it.
        kinds = {number: request.kind for number, request in waiting.items()}
        kind = next((kind for kind in kinds.values() if kind is not Ask), Ask)
        chosen = {n: waiting.pop(n) for n in kinds if kinds[n] == kind}
        alike = list(chosen.values())
        answers = dict(
            zip(chosen, alike[0].answers(alike), strict=True) if alike else ()
        )
    return [results[number] for number in running]
