"""An operation that ran, as those who follow the samples see it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Batched, Place


@dataclass(slots=True)  # one for every operation: a frozen one takes twice as long
class Step:
    """An operation that ran.

    Attributes:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        known: The arguments that hold samples in a known place, leading one first.
        x: The leading argument.
        axis: Where it holds samples; asked only where all layouts are regular.
        result: All it returned.
        out: One tensor of it.
        number: Which one, counted through nested results.
        origin: Looks up what is known of any tensor.
        spaces: Ids of rows by their number, for rows that nothing was written to.
    """

    func: Callable[..., Value]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    known: list[tuple[Tensor, Place]]
    x: Tensor
    axis: Axis
    result: Value
    out: Tensor
    number: int
    origin: Callable[[Tensor], object]
    spaces: dict[int, Tensor]

    def axes(self, t: Tensor) -> Axis | None:
        """Where any tensor holds samples, if regularly."""
        place = self.place(t)
        return place if isinstance(place, Axis) else None

    def place(self, t: Value) -> Place | None:
        """Where any tensor holds samples."""
        found = self.origin(t) if isinstance(t, Tensor) else None
        return found.place if isinstance(found, Batched) else None

    def ids(self, t: Value) -> Tensor | None:
        """The sample of every entry of any tensor, None if it holds none."""
        place = self.place(t)
        if place is None:
            return None
        return place.ids if isinstance(place, Labels) else place.labels(t).ids

    def argument(self, place: int, *names: str) -> Value:
        """An argument by position or by one of its names, None if it was not given."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)


def operations(*names: str) -> Iterator[Callable[..., Value]]:
    """Every torch function and tensor method of these names."""
    for name in names:
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.special):
            if hasattr(owner, name):
                yield getattr(owner, name)


# Families of operations that more than one rule asks about.
ROLLING = frozenset(operations("roll"))
SORTING = frozenset(operations("sort", "argsort", "topk", "msort"))
SELECTING = frozenset(operations("index_select"))
ALONG = frozenset(operations("take_along_dim"))
SIZED = frozenset(operations("chunk", "split", "tensor_split", "split_with_sizes"))
SPLITTING = frozenset(operations("unbind", "unsafe_chunk", "unsafe_split"))
