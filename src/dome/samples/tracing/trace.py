"""What the capture knows about the tensors of a forward pass.

A tensor that depends on the model's input is *batched* and has an axis of samples. One
that depends on tracked parameters but on no input is a *derived* weight. Everything
else is a constant. Tensors are remembered weakly, by identity.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from dome.samples.store.sink import Sink
from dome.samples.store.wanted import Pass, Wanted
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.engine import holds_captures
from dome.samples.tracing.flow import Step, follow, operations
from dome.samples.tracing.nested import Value, tensors


@dataclass(frozen=True, slots=True)
class Batched:
    """Depends on the model's input; the axis is None where sight of it was lost."""

    axis: Axis | None


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


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on its way to torch, with the tensors among its arguments sorted."""

    func: Callable[..., Value]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    batched: list[Tensor]
    derived: list[Tensor]
    in_place: bool


@cache
def writes(func: Callable[..., Value]) -> bool:
    """Whether an operation writes to its first argument."""
    name = func.__name__
    dunder = name.endswith("__")
    return name in _WRITING if dunder else name.endswith("_")


_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


class Trace:
    """The origins of the tensors alive, and the way back into the capture.

    Args:
        model: To name a layer that has no tracked parameter.
        resume: Context in which operations are seen by the capture again; inside a
            rule they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        resume: Callable[[], AbstractContextManager[Value]],
    ) -> None:
        self._model = weakref.ref(model)
        self.resume = resume
        self.batch = 0
        self._pass: Pass | None = None
        self._wanted: Wanted | None = None
        self._parameters: dict[int, Derived] = {}
        self._known: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}

    def begin(self, batch: int, wanted: Wanted) -> None:
        """Start a forward pass of so many samples, for those who want them."""
        self.batch = batch
        self._pass = Pass(batch, wanted)
        if wanted is not self._wanted:
            self._wanted = wanted
            self._parameters = {id(p): Derived((p,)) for p in wanted.parameters}

    def end(self) -> None:
        """Forget the tensors that a forward pass did not leave behind."""
        # One that it did leave (a carried hidden state) stays batched.
        self._known = {k: v for k, v in self._known.items() if v[0]() is not None}

    def origin(self, t: Tensor) -> Origin | None:
        """Where a tensor comes from, None for a constant."""
        found = self._known.get(id(t))
        if found is not None and found[0]() is t:
            return found[1]
        if not t.requires_grad:
            return None
        parameter = self._parameters.get(id(t))
        if parameter is None and t.grad_fn is not None:
            # Made outside the pass: of weights alone, as a cached parametrization is,
            # or of the samples of another pass.
            mixed = holds_captures(t.grad_fn)
            return Batched(None) if mixed else Derived(self._all())
        return parameter

    def _all(self) -> tuple[nn.Parameter, ...]:
        return () if self._wanted is None else self._wanted.parameters

    def mark(self, t: Tensor, origin: Origin) -> None:
        """Remember where a tensor comes from."""
        self._known[id(t)] = (weakref.ref(t), origin)

    def mark_axis(self, t: Tensor, axis: Axis | None) -> None:
        """Remember where a tensor holds its samples."""
        self.mark(t, Batched(axis))

    def axis(self, t: Tensor) -> Axis | None:
        """Where a tensor holds samples, None if it does not or nobody knows."""
        origin = self.origin(t)
        return origin.axis if isinstance(origin, Batched) else None

    def sink(self, t: Tensor | None) -> Sink | None:
        """Where the per-sample gradient of a weight goes, None if it is not tracked."""
        origin = None if t is None else self.origin(t)
        if t is None or not isinstance(origin, Derived) or self._pass is None:
            return None
        # A weight kept from an earlier pass may come from what nobody wants now.
        sources = tuple(p for p in origin.sources if p in self._pass.wanted)
        return Sink(self._pass, t, sources) if sources else None

    def name(self, *weights: Tensor | None) -> str:
        """The first parameter or buffer behind these tensors, as the user calls it."""
        for t in weights:
            origin = None if t is None else self.origin(t)
            if isinstance(origin, Derived) and self._wanted is not None:
                return self._wanted.name(origin.sources[0])
        model = self._model()
        for name, buffer in model.named_buffers() if model is not None else ():
            if any(buffer is t for t in weights):
                return name
        return "?"

    def layer(self, *weights: Tensor | None) -> str:
        """The layer that owns the first parameter or buffer behind these tensors."""
        return f"layer {self.name(*weights).rpartition('.')[0]!r}"

    def lost(self, problem: str, *weights: Tensor | None) -> RuntimeError:
        """The error for a call whose samples cannot be told apart."""
        return RuntimeError(
            f"cannot tell the {self.batch} samples apart where parameter "
            f"{self.name(*weights)!r} is used: {problem}. If the batch is not the "
            "first dimension of the model's input, pass batch_dim=...; otherwise use "
            'samples="microbatch"'
        )

    def leading(self, batched: list[Tensor]) -> list[tuple[Tensor, Axis]]:
        """The tensors whose axis is known, the most trustworthy first.

        A mask passed to the model may be square by chance and taken for samples; what
        has a gradient and more entries is not a mask.
        """
        known = [(t, axis) for t in batched if (axis := self.axis(t)) is not None]
        if len(known) > 1:
            known.sort(key=lambda pair: (pair[0].requires_grad, pair[0].numel()))
        return known[::-1]

    def note(self, call: "Call", out: Value) -> None:
        """Remember what the results of an operation that ran depend on."""
        if call.batched:
            known = self.leading(call.batched)
            for t in tensors(out):
                if call.in_place or not self._is_known(t):
                    self.mark_axis(t, self._followed(call, known, t))
                if call.in_place and t._base is not None:
                    self._note_base(t._base)
        elif call.derived:
            sources = {id(p): p for t in call.derived for p in self._sources(t)}
            origin = Derived(tuple(sources.values()), _copied(call))
            for t in tensors(out):
                if t.requires_grad and id(t) not in self._parameters:
                    self.mark(t, origin)

    def _note_base(self, base: Tensor) -> None:
        """A view of this tensor was written to, as in ``out[:, t].copy_(h)``."""
        if not self._is_known(base):
            places = [dim for dim, size in enumerate(base.shape) if size == self.batch]
            self.mark_axis(
                base, Axis(places[0], self.batch) if len(places) == 1 else None
            )

    def sort(self, args: Value, kwargs: Value) -> tuple[list[Tensor], list[Tensor]]:
        """The batched and the derived tensors among the arguments."""
        batched: list[Tensor] = []
        derived: list[Tensor] = []
        for value in (*args, *kwargs.values()) if kwargs else args:
            # Most arguments are tensors or numbers; nested ones are rare.
            if isinstance(value, Tensor):
                self._sort_one(value, batched, derived)
            elif isinstance(value, tuple | list | dict):
                for t in tensors(value):
                    self._sort_one(t, batched, derived)
        return batched, derived

    def _sort_one(
        self, t: Tensor, batched: list[Tensor], derived: list[Tensor]
    ) -> None:
        origin = self.origin(t)
        if isinstance(origin, Batched):
            batched.append(t)
        elif origin is not None:
            derived.append(t)

    def _sources(self, t: Tensor) -> tuple[nn.Parameter, ...]:
        origin = self.origin(t)
        return origin.sources if isinstance(origin, Derived) else ()

    def _is_known(self, t: Tensor) -> bool:
        found = self._known.get(id(t))
        return found is not None and found[0]() is t

    def _followed(
        self, call: "Call", known: list[tuple[Tensor, Axis]], out: Tensor
    ) -> Axis | None:
        if not known:
            return None
        return follow(
            Step(call.func, call.args, call.kwargs, *known[0], out, self.axis)
        )


_COPYING = frozenset(
    operations("expand", "expand_as", "broadcast_to", "repeat", "tile")
)


def _copied(call: Call) -> Tensor | None:
    """What the result of an operation consists of copies of, if of anything."""
    copies = call.func in _COPYING and isinstance(call.args[0], Tensor)
    return call.args[0] if copies else None
