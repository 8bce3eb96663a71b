"""What is known of one tensor of a forward pass.

A tensor that depends on the model's input is *batched*; one that depends on tracked
parameters but on no input is a *derived* weight; everything else is a constant.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels, either
from dome.samples.tracing.nested import Value
from dome.torch_private import not_a_view, unpacked

Place = Axis | Labels


@dataclass(slots=True, eq=False)  # never changed: a frozen one takes twice as long
class Batched:
    """Depends on the model's input.

    Attributes:
        place: Where the samples lie; None where sight of them was lost.
        mixed: The operation that brought several samples together, if one did. The
            place is then the one that its shape suggests.
        hidden: The operation behind which nobody knows, if one has a gradient.
        doubt: True, on the device, if entries of different samples have met.
        inputs: Which inputs of the model it depends on, as bits (``roles``).
    """

    place: Place | None
    mixed: str | None = None
    hidden: str | None = None
    doubt: Tensor | None = None
    inputs: int = 0

    @property
    def is_fine(self) -> bool:
        """Whether no samples have met, as far as one can tell."""
        return self.mixed is None and self.hidden is None and self.doubt is None

    def joined(self, other: "Batched") -> "Batched":
        """The same place with what is wrong with either."""
        if other.is_fine:
            return self
        return Batched(
            self.place,
            self.mixed or other.mixed,
            self.hidden or other.hidden,
            either(self.doubt, other.doubt),
        )


@dataclass(frozen=True, slots=True)
class Derived:
    """Computed from tracked parameters alone.

    Attributes:
        sources: The parameters.
        copied: What it is made of copies of, if it was expanded or repeated.
    """

    sources: tuple[nn.Parameter, ...]
    copied: Tensor | None = None


Origin = Batched | Derived


@dataclass(slots=True, eq=False)  # one for every operation
class Call:
    """An operation on its way to torch, with the tensors among its arguments sorted.

    Attributes:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        batched: The tensors among them that depend on the model's input.
        origins: What is known of each of these.
        derived: Those that are tracked weights, or made of them alone.
        in_place: Whether it writes to its first argument.
        value: What the operation itself returned, where a rule only records.
        is_due: Whether what such a rule computes is compared with it this time.
    """

    func: Callable[..., Value]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    batched: list[Tensor]
    origins: list[Batched]
    derived: list[Tensor]
    in_place: bool
    value: Value = None
    is_due: bool = False

    def plain(self) -> Value:
        """What the operation returns without a filter, with a graph to be dropped.

        Torch chooses kernels by whether there is a graph.
        """
        with torch.enable_grad(), unpacked():
            return self.func(*self.args, **self.kwargs)

    def run(self) -> Tensor:
        """The same of an operation with one result, without the graph."""
        return own(self.plain())

    def known(self) -> list[tuple[Tensor, Place]]:
        """The tensors whose samples lie in a known place, the most trustworthy first.

        A mask passed to the model may be square by chance and taken for samples; what
        has a gradient and more entries is not a mask.
        """
        pairs = zip(self.batched, self.origins, strict=True)
        known = [(t, origin.place) for t, origin in pairs if origin.place is not None]
        if len(known) > 1:
            known.sort(key=lambda pair: (pair[0].requires_grad, pair[0].numel()))
            known.reverse()
        return known


def own(t: Tensor) -> Tensor:
    """The same numbers without a graph, free to be written to in place."""
    return not_a_view(t).detach()
