"""What is known of the tensors of a forward pass, and the operations between them.

A tensor that depends on the model's input is *batched*; one that depends on tracked
parameters but on no input is a *derived* weight; everything else is a constant.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import torch
from torch import Tensor, nn

from dome.samples.tracing.axis import Axis, Labels, either
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

    def alike(self, other: "Batched") -> bool:
        """Whether both hold the same inputs' samples in the same place."""
        return self.place == other.place and self.inputs == other.inputs

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
        return None if place is None else place.labels(t).ids

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
BROADCASTING = frozenset(
    operations(
        *("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide"),
        *("add_", "sub_", "mul_", "div_", "rsub", "__rsub__", "__rdiv__"),
        *("__radd__", "__rmul__", "__rpow__", "__add__", "__sub__", "__mul__"),
        *("__truediv__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("__pow__", "__rtruediv__", "pow", "pow_", "float_power", "where", "clamp"),
        *("maximum", "minimum", "fmax", "fmin", "addcmul", "addcdiv", "lerp", "xlogy"),
        *("atan2", "hypot", "logaddexp", "remainder", "logical_and", "logical_or"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    )
)
ROLLING = frozenset(operations("roll"))
SORTING = frozenset(operations("sort", "argsort", "topk", "msort"))
SELECTING = frozenset(operations("index_select"))
ALONG = frozenset(operations("take_along_dim"))
SIZED = frozenset(operations("chunk", "split", "tensor_split", "split_with_sizes"))
SPLITTING = frozenset(operations("unbind", "unsafe_chunk", "unsafe_split"))


def einsum_words(args: tuple[Value, ...]) -> list[str] | None:
    """The letters of every operand and of the result; None if they are not spelt."""
    equation = args[0]
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    words = inputs.split(",")
    if "." in equation:
        # An ellipsis stands for letters of its own, lined up from the right.
        spare = "".join(c for c in ascii_uppercase if c not in equation)
        operands = einsum_operands(args)
        most = max(
            (
                t.ndim - len(w) + 3
                for w, t in zip(words, operands, strict=True)
                if "." in w
            )
        )
        words = [
            w.replace("...", spare[most - (t.ndim - len(w) + 3) : most])
            for w, t in zip(words, operands, strict=True)
        ]
        output = output.replace("...", spare[:most])
    return [*words, output]


def einsum_operands(args: tuple[Value, ...]) -> Sequence[Tensor]:
    """The operands, given one by one or in a list."""
    return args[1:] if isinstance(args[1], Tensor) else args[1]
