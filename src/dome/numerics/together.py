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

from dome.numerics.shard import Total

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    """Small tensors to be added up over the workers that hold the other rows."""

    total: Total
    tensors: tuple[Tensor, ...]


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
        """Requests of one kind can be answered as one batch."""
        shapes = tuple((m.shape, m.dtype) for m in self.matrices)
        return self.function, self.options, shapes


@dataclass(frozen=True, slots=True)
class Ask:
    """Scalars to decide by: the answer is a list of numbers."""

    scalars: tuple[Tensor, ...]


Request = Sum | Small | Ask
Steps = Generator[Request, Any, T]


@torch.no_grad()
def together(updates: Iterable[Steps[T]]) -> list[T]:
    """Run updates side by side; what each of them returned."""
    running = dict(enumerate(updates))
    results: dict[int, T] = {}
    waiting: dict[int, Request] = {}

    def resume(number: int, answer: object) -> None:
        try:
            waiting[number] = running[number].send(answer)
        except StopIteration as end:
            results[number] = end.value

    for number in running:
        resume(number, None)
    while waiting:
        chosen, answers = _answers(waiting)
        for number in chosen:
            del waiting[number]
        for number, answer in zip(chosen, answers, strict=True):
            resume(number, answer)
    return [results[number] for number in running]


def _answers(waiting: dict[int, Request]) -> tuple[list[int], Sequence[object]]:
    """Which requests are answered now, and the answers; the device is asked last."""
    first = next((r for r in waiting.values() if not isinstance(r, Ask)), None)
    if isinstance(first, Sum):
        same = {n: r for n, r in waiting.items() if isinstance(r, Sum)}
        return list(same), _sums(first.total, [r.tensors for r in same.values()])
    if isinstance(first, Small):
        alike = {
            n: r
            for n, r in waiting.items()
            if isinstance(r, Small) and r.kind == first.kind
        }
        return list(alike), _batch(list(alike.values()))
    asked = {n: r.scalars for n, r in waiting.items() if isinstance(r, Ask)}
    return list(asked), _numbers(list(asked.values()))


def _sums(total: Total, requests: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    flat = iter(total(*(tensor for tensors in requests for tensor in tensors)))
    return [tuple(next(flat) for _ in tensors) for tensors in requests]


def _batch(requests: list[Small]) -> list[tuple[Tensor, ...]]:
    first, *others = requests
    if not others:
        return [first.function(*first.matrices, *first.options)]
    columns = zip(*(request.matrices for request in requests), strict=True)
    stacked = [torch.stack(column) for column in columns]
    results = first.function(*stacked, *first.options)
    return list(zip(*(result.unbind() for result in results), strict=True))


def _numbers(requests: list[tuple[Tensor, ...]]) -> list[list[float]]:
    scalars = [scalar for scalars in requests for scalar in scalars]
    # The only place where a tracker waits for its device.
    flat = iter(torch.stack([s.to(torch.float64) for s in scalars]).tolist())
    return [[next(flat) for _ in scalars] for scalars in requests]
