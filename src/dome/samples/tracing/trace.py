"""What the capture knows about the tensors of a forward pass.

Tensors are remembered weakly, by identity; ``origins`` says what is known of each.

What autograd's graph tells about a tensor that no watched operation made.
"""

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import cast

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dome.samples.store.gradients import Questions
from dome.samples.store.sink import Pass, Sink, Wanted
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.inputs import Alignment, Inputs
from dome.samples.tracing.memory import Memory, seen_after
from dome.samples.tracing.moves import follow, partners, unmoved
from dome.samples.tracing.nested import Value, is_dense, tensors
from dome.samples.tracing.origins import (
    Batched,
    Call,
    Derived,
    Origin,
    Place,
    Step,
    operations,
)

# Tensors that passes have left behind, below which nobody looks for those that died.
FEW_LEFT = 1000

# By the tensor's id; the last is when it was known, in writes to memory.
_Entry = tuple[weakref.ref[Tensor], Origin | None, int]
_Known = dict[int, _Entry]


@cache
def writes(func: Callable[..., Value]) -> bool:
    """Whether an operation writes to its first argument."""
    name = func.__name__
    dunder = name.endswith("__")
    return name in _WRITING if dunder else name.endswith("_")


_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
# In place these change a shape or a graph, and no number.
_RESHAPING = frozenset(
    operations(
        *("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"),
        *("as_strided_", "resize_", "resize_as_", "requires_grad_", "detach_"),
    )
)
# Puts a tensor into the memory of another: ``x.data = y``.
_ADOPTING = Tensor.data.__set__  # type: ignore[attr-defined]


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
        # What to raise if samples are mixed anywhere. Integers that mixed them, such as
        # an order found by sorting, count as well then.
        self.strict: type[RuntimeError] | None = None
        # Whether all of this ran before: a checkpoint computes it once more.
        self.again = False
        self.questions = Questions()
        self.batch = 0
        # The first weights that met samples by number, to name them later.
        self.by_number: tuple[Tensor, ...] = ()
        self.spaces: dict[int, Tensor] = {}
        # Which inputs have met the first, and the bit of each by its name.
        self.alignment = Alignment()
        self._bits: dict[str, int] = {}
        # Inputs of another size that might be the ones with samples, by their names.
        self.others: list[str] = []
        # How often operations whose rules only record have met their weights.
        self.compared: dict[tuple[Hashable, ...], int] = {}
        self._pass: Pass | None = None
        self._wanted: Wanted | None = None
        self._tracked: dict[int, nn.Parameter] = {}
        self._parameters: dict[int, Derived] = {}
        self._known: _Known = {}
        self._memory = Memory()
        # What earlier passes left behind, and how much of it to look through next.
        self._left: _Known = {}
        self._most_left = FEW_LEFT

    def begin(self, inputs: Inputs, wanted: Wanted) -> None:
        """Start a forward pass with these inputs, for those who want its samples."""
        self.batch, self.spaces = inputs.num_samples, inputs.spaces
        self._pass = Pass(self.batch, wanted)
        names: dict[int, str] = {}
        for t, place, name in inputs.places:
            bit = self._bits.setdefault(name, 1 << len(self._bits)) if name else 0
            self.mark(t, Batched(place, inputs=bit))
            names |= {bit: name} if name else {}
        for t in inputs.fixed:
            self.mark(t, None)  # also if an earlier pass took it for samples
        # Of one sample alone, whatever is computed is that sample's.
        several = self.batch > 1
        self.alignment = Alignment(names if several else {})
        self.others = inputs.others if several else []
        if wanted is not self._wanted:
            self._wanted = wanted
            self._tracked = {id(p): p for p in wanted.parameters}
            self._parameters = {id(p): Derived((p,)) for p in wanted.parameters}

    def end(self) -> None:
        """Forget the tensors that a forward pass did not leave behind."""
        # One that it did leave (a carried hidden state) stays batched; statistics of
        # the batch that it left in a buffer are constants of the next pass.
        for key in tuple(self._known):
            t = self._known[key][0]()
            if t is not None and (t.requires_grad or _has_place(self.origin(t))):
                self._left[key] = self._known[key]
            else:
                self._left.pop(key, None)
        self._known = {}
        self._memory.forget()
        # Seldom: who keeps all batches in a list would look at all of them each time.
        if len(self._left) > self._most_left:
            self._left = _alive(self._left)
            self._most_left = max(FEW_LEFT, 2 * len(self._left))
        self.spaces, self.by_number = {}, ()

    def snapshot(self) -> "Trace":
        """What is known now, for computing once more what follows.

        Tensors are held as weakly as here: what computes again must hold those it
        starts from. What is in doubt was asked the first time.
        """
        self._known = _alive(self._known)
        twin = copy.copy(self)
        twin._known, twin._memory = dict(self._known), self._memory.copied()
        twin.questions, twin.again = Questions(), True
        return twin

    def origin(self, t: Tensor) -> Origin | None:
        """Where a tensor comes from, None for a constant."""
        found = self._known.get(id(t)) or self._left.get(id(t))
        if found is not None:
            if found[0]() is not t:
                found = None
            elif not self._memory.writes:
                return found[1]
        if self._memory.writes:
            found = self._looked_at_again(t, found)
            if found is not None:
                return found[1]
        if not t.requires_grad:
            return None
        parameter = self._parameters.get(id(t))
        if parameter is None and t.grad_fn is not None:
            # Made outside the pass: of weights alone, as a cached parametrization is,
            # or of the samples of another pass; or of parameters that nobody tracks.
            sources = ancestors(t.grad_fn, self._tracked)
            other = Batched(None, hidden=_UNSEEN)
            outside = other if sources is None else Derived(sources)
            self.mark(t, outside if sources != () else None)
            return outside if sources != () else None
        return parameter

    def _looked_at_again(self, t: Tensor, found: _Entry | None) -> _Entry | None:
        """What is known of a tensor, writes through others of its memory included."""
        origin, time = (None, 0) if found is None else found[1:]
        writes = self._memory.since(t, time)
        for write in writes:
            origin = seen_after(write, t, origin)
            origin = self._counted(origin, t) if isinstance(origin, Batched) else origin
        if writes:
            self.mark(t, origin)
            found = self._known[id(t)]
        return found

    def mark(self, t: Tensor, origin: Origin | None) -> None:
        """Remember where a tensor comes from, None for a constant."""
        self._known[id(t)] = (weakref.ref(t), origin, self._memory.time)

    def mark_axis(self, t: Tensor, place: Place | None) -> None:
        """Remember where a tensor holds its samples."""
        self.mark(t, Batched(place))

    def axis(self, t: Tensor) -> Axis | None:
        """Where a tensor holds samples, None if not in a regular layout."""
        place = self.place(t)
        return place if isinstance(place, Axis) else None

    def place(self, t: Tensor) -> Place | None:
        """Where a tensor holds samples, None if it does not or nobody knows."""
        origin = self.origin(t)
        return origin.place if isinstance(origin, Batched) else None

    def sink(self, t: Tensor | None) -> Sink | None:
        """Where the per-sample gradient of a weight goes, None if it is not tracked."""
        origin = None if t is None else self.origin(t)
        if t is None or not isinstance(origin, Derived) or self._pass is None:
            return None
        sources = origin.sources
        if id(t) not in self._parameters:
            # A weight kept from an earlier pass may come from what nobody wants now.
            sources = tuple(p for p in sources if p in self._pass.wanted)
        if not sources:
            return None
        edge = None if t is sources[0] else get_gradient_edge(t)
        return Sink(self._pass, sources, t.dtype, edge)

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
            "first dimension of the model's input, pass batch_dim=...; if more inputs "
            "hold samples, name them all: samples_in=(...); otherwise use "
            'samples="microbatch"'
        )

    def mixes(self, how: str, *weights: Tensor | None) -> RuntimeError:
        """The error for a parameter that meets samples after they were mixed.

        Or for any mix of samples, where none may be.
        """
        if self.strict is not None:
            return self.strict(
                f"the model mixes samples by {how}: clipping one bounds nothing. Make "
                f"every sample's output depend on that sample alone, and detach() what "
                f"is computed of a batch for other ends"
            )
        return RuntimeError(
            f"parameter {self.name(*weights)!r} meets samples that were mixed by {how}:"
            " its row would hold parts of other samples. Mix after the last tracked "
            "parameter, leave this one out (parameters=...), pass allow_mixing=True if "
            'rows may hold such parts, or use samples="microbatch"'
        )

    def met_by_number(self, *weights: Tensor) -> None:
        """Remember that a weight met samples that are not in a regular layout."""
        self.by_number = self.by_number or weights

    def note(self, call: Call, out: Value) -> None:
        """Remember what the results of an operation that ran depend on."""
        if not call.batched:
            self._note_derived(call, out)
            return
        if out is None and call.func == _ADOPTING:
            t, source = call.args[:2]
            self.mark(t, self.origin(source))
            return
        anew = call.in_place or "out" in call.kwargs
        if not anew:
            self._note_results(call, out)
            if self.alignment.is_open:
                self._relate(call, out)
            return
        targets = tensors(out)
        before = [self.origin(t) for t in targets]
        self._note_results(call, out, anew)
        if self.alignment.is_open:
            self._relate(call, out)
        if call.func not in _RESHAPING:
            for t, earlier in zip(targets, before, strict=True):
                self._note_write(t, earlier)

    def _note_results(self, call: Call, out: Value, anew: bool = False) -> None:
        if isinstance(out, Tensor):
            if not is_dense(out):
                hidden = f"{call.func.__name__!r} (layout {out.layout})"
                self.mark(out, Batched(None, hidden=hidden))
                return
            # Most rules have said where their results hold samples.
            if not anew and self.knows(out):
                return
            same = unmoved(call, out)
            if same is not None:
                self.mark(out, same)
                return
        results = tensors(out)
        if anew or not all(map(self.knows, results)):
            self._note_batched(call, out, results, anew)

    def _relate(self, call: Call, out: Value) -> None:
        """Note which inputs results depend on, and whether these met one by one."""
        if self.again:
            return
        inputs = 0
        for origin in partners(call):
            inputs |= origin.inputs
        results = tensors(out)
        found = [known for t in results if (known := self._made_of(t, inputs))]
        matters = any(t.requires_grad for t in results)
        if call.derived and matters:
            self.alignment.use(inputs)
        if found and self.alignment.are_apart(inputs):
            self._line_up(inputs, found, matters, call.func.__name__.strip("_"))

    def _made_of(self, t: Tensor, inputs: int) -> Batched | None:
        """What is known of a tensor that depends on these inputs, with that."""
        known = self.origin(t)
        if not isinstance(known, Batched):
            return None
        known = replace(known, inputs=inputs)
        self.mark(t, known)
        return known

    def _line_up(
        self, inputs: int, found: list[Batched], matters: bool, name: str
    ) -> None:
        """Inputs have met for the first time: one by one, or in another way."""
        lines = self.alignment
        suspect = lines.unclear(inputs)
        how = f"{name!r} does not bring the two together one by one"
        error = RuntimeError(lines.sentence(suspect, self.batch, how))
        if all(o.place is not None and not (o.mixed or o.hidden) for o in found):
            lines.line_up(inputs)
            for origin in found if suspect else ():
                self.questions.raise_if(origin.doubt, error)
        elif suspect and matters:
            raise error

    def _note_derived(self, call: Call, out: Value) -> None:
        sources = {id(p): p for t in call.derived for p in self.sources(t)}
        copies = call.func in _COPYING and isinstance(call.args[0], Tensor)
        origin = Derived(tuple(sources.values()), call.args[0] if copies else None)
        for t in tensors(out):
            if t.requires_grad and id(t) not in self._parameters:
                if call.in_place:
                    self._memory.note(t, origin)
                self.mark(t, origin)

    def _note_batched(
        self, call: Call, out: Value, results: list[Tensor], anew: bool
    ) -> None:
        known, before = call.known(), None
        for origin in call.origins:
            if not origin.is_fine:
                before = origin if before is None else before.joined(origin)
        for number, t in enumerate(results):
            if anew or not self.knows(t):
                found: Batched | None = Batched(None)
                if known:
                    x, place = cast("tuple[Tensor, Axis]", known[0])
                    step = Step(
                        *(call.func, call.args, call.kwargs, known, x, place),
                        *(out, t, number, self.origin, self.spaces),
                    )
                    found = follow(step)
                if found is not None and before is not None:
                    found = found.joined(before)
                self.mark(t, None if found is None else self._counted(found, t))

    def _counted(self, origin: Batched, t: Tensor) -> Batched:
        """An origin without the mixing that cannot reach a gradient: of integers."""
        if self.strict or t.is_floating_point() or t.is_complex():
            return origin
        place = origin.place if origin.mixed is None else None
        return Batched(place, inputs=origin.inputs)

    def _note_write(self, t: Tensor, before: Origin | None) -> None:
        """Remember a write for whatever else lies in its memory.

        Args:
            t: What was written to.
            before: What was known of it before.
        """
        after = self.origin(t)
        if not isinstance(after, Batched):
            return
        same = isinstance(before, Batched) and before.alike(after)
        # Else every entry is still the one sample's, as after most such operations.
        if not same or after.place is None or not after.is_fine:
            self._memory.note(t, after)
            self.mark(t, after)

    def sort(
        self, values: Sequence[Value]
    ) -> tuple[list[Tensor], list[Batched], list[Tensor]]:
        """The batched tensors among arguments, what is known of them; the derived."""
        batched: list[Tensor] = []
        origins: list[Batched] = []
        derived: list[Tensor] = []
        for t in tensors(values):
            origin = self.origin(t)
            if isinstance(origin, Batched):
                # Integers of no known place are coordinates and counts: constants.
                real = t.is_floating_point() or t.is_complex()
                if origin.place is not None or self.strict or real:
                    batched.append(t)
                    origins.append(origin)
            elif origin is not None:
                derived.append(t)
        return batched, origins, derived

    def sources(self, t: Tensor) -> tuple[nn.Parameter, ...]:
        """The tracked parameters that a weight is made of."""
        origin = self.origin(t)
        return origin.sources if isinstance(origin, Derived) else ()

    def knows(self, t: Tensor) -> bool:
        """Whether somebody has said where a tensor comes from."""
        found = self._known.get(id(t)) or self._left.get(id(t))
        return found is not None and found[0]() is t


def _alive(known: _Known) -> _Known:
    return {key: entry for key, entry in known.items() if entry[0]() is not None}


def _has_place(origin: Origin | None) -> bool:
    if not isinstance(origin, Batched):
        return True
    return origin.place is not None and origin.mixed is None


_COPYING = frozenset(
    operations("expand", "expand_as", "broadcast_to", "repeat", "tile")
)


_UNSEEN = "another forward pass, or a function of TorchScript,"
# The autograd functions of the rules: a graph that holds one holds samples.
_RULES = "dome.samples.rules."


def ancestors(
    node: Node, tracked: Mapping[int, nn.Parameter]
) -> tuple[nn.Parameter, ...] | None:
    """The tracked parameters behind a graph; None if it holds captured samples.

    Args:
        node: Where the graph of the tensor starts.
        tracked: The parameters, by their ``id``.
    """
    seen, waiting = {node}, [node]
    found: dict[int, nn.Parameter] = {}
    while waiting:
        node = waiting.pop()
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and made_by.__module__.startswith(_RULES):
            return None
        leaf = id(getattr(node, "variable", None))
        if leaf in tracked:
            found[leaf] = tracked[leaf]
        fresh = {parent for parent, _ in node.next_functions if parent is not None}
        waiting += fresh - seen
        seen |= fresh
    return tuple(found.values())
