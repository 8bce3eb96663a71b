"""What is known of one tensor of a forward pass.

A tensor that depends on the model's input is *batched*; one that depends on tracked
parameters but on no input is a *derived* weight; everything else is a constant.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels, either
from dome.samples.tracing.nested import Value

Place = Axis | Labels


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """Depends on the model's input.

    Attributes:
        place: Where the samples lie; None where sight of them was lost.
        mixed: The operation that brought several samples together, if one did. The
            place is then the one that its shape suggests.
        hidden: The operation behind which nobody knows, if one has a gradient.
        doubt: True, on the device, if entries of different samples have met.
    """

    place: Place | None
    mixed: str | None = None
    hidden: str | None = None
    doubt: Tensor | None = None

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


@dataclass(slots=True)  # one for every operation: a frozen one takes twice as long
class Call:
    """An operation on its way to torch, with the tensors among its arguments sorted."""

    func: Callable[..., Value]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    batched: list[Tensor]
    derived: list[Tensor]
    in_place: bool
