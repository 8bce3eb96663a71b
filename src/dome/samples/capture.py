"""One capture a model: its forward passes are watched once, for all who take samples.

    model(...) ──► Capture ──► rules ──► Sink ──► Rows of filter 1 ──► take() (B, D₁)
                   one a model   one an operation └► Rows of filter 2 ──► take() (B, D₂)

Filters that share a model (one optimizer for the matrices and one for the rest, or one
for every parameter) subscribe with the parameters they want. An operation is captured
if anybody wants a parameter in it; its per-sample gradients are made once and handed
to whoever wants them. Each taker arms itself, takes and forgets by itself.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dome.samples.checkpoint import note_call, see_again
from dome.samples.rules import ALWAYS, LIKE, PASSIVE, QUESTIONS, rule_for
from dome.samples.store.sink import Taker, Wanted
from dome.samples.tracing.inputs import (
    WATCHED,
    Inputs,
    Roles,
    Signature,
    check_names,
    inputs_of,
)
from dome.samples.tracing.nested import Value, is_dense
from dome.samples.tracing.origins import Call, Place
from dome.samples.tracing.refuse import (
    admit,
    check_order,
    check_roles,
    reentrant,
    refuse_mix,
    refuse_order,
)
from dome.samples.tracing.trace import Trace, writes
from dome.torch_private import (
    GraphBreak,
    checkpoint_frame,
    hooks_on_saved,
    in_checkpoint_recomputation,
    in_reentrant_checkpoint,
    inside_transform,
    never_compile,
    uncompiled,
    unpacked,
)

ONE_GRAPH = (
    "dome captures samples where the model is called, as Python: leave fullgraph=True "
    "out, or compile parts of the model with it"
)


class _Here(threading.local):
    """Where one thread is: others may evaluate the model while this one trains it."""

    depth = 0  # calls of the model inside each other
    watching = False


class Capture:
    """Watches a model's forward passes while anybody wants samples of them.

    Args:
        model: Hooks are registered on it, and nothing else; it is held weakly.
        batch_dim: The dimension of the model's input that enumerates the samples.
        samples_in: The inputs that hold samples, if they are declared.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: int = 0,
        samples_in: tuple[str, ...] | None = None,
    ) -> None:
        self.batch_dim, self.samples_in = batch_dim, samples_in
        self._roles = Roles(Signature.of(model), samples_in)
        self._roles_of_parts = Roles(WATCHED, samples_in)
        self._model = weakref.ref(model)
        self._mode = CaptureMode(model)
        # What was in doubt when parameters met samples.
        self.questions = self._mode.trace.questions
        bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
        self._last_offset = bags[0].include_last_offset if bags else None
        self._takers: list[Taker] = []
        self._wanted: Wanted | None = None
        # A call with one tensor: its roles and shape, B, and where it holds samples.
        self._settled: tuple[tuple[Roles, torch.Size], int, Place, str] | None = None
        self._allowing: set[int] = set()
        self._strict: dict[int, type[RuntimeError]] = {}
        self._num_pauses = 0
        # What the calls inside a checkpoint that is computed again were captured for.
        self.replayed: Iterator[Wanted | None] = iter(())
        self._here, self._is_busy = _Here(), False
        self._stack = ExitStack()
        self._handles: tuple[RemovableHandle, ...] = ()

    @property
    def is_used(self) -> bool:
        """Whether anybody takes samples."""
        return bool(self._takers)

    def subscribe(
        self,
        taker: Taker,
        *,
        allow_mixing: bool = False,
        strict: type[RuntimeError] | None = None,
    ) -> None:
        """Feed a taker from the next forward pass on.

        Args:
            taker: Who wants samples.
            allow_mixing: Parameters may meet mixed samples, if all takers say so.
            strict: No samples may be mixed at all, if one taker gives an error.
        """
        self._allowing |= {id(taker)} if allow_mixing else set()
        self._strict |= {id(taker): strict} if strict else {}
        model = self._model()
        if model is not None and not self._handles:
            never_compile("dome")
            self._handles = (
                model.register_forward_pre_hook(GraphBreak(ONE_GRAPH)),
                model.register_forward_pre_hook(self._enter, with_kwargs=True),
                model.register_forward_hook(self._leave, always_call=True),
            )
        self._takers.append(taker)

    def unsubscribe(self, taker: Taker) -> None:
        """Feed a taker no more; the hooks go with the last one."""
        self._takers = [other for other in self._takers if other is not taker]
        self._allowing.discard(id(taker))
        self._strict.pop(id(taker), None)
        if not self._takers:
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    @contextmanager
    def watch(
        self,
        inputs: Sequence[Value],
        named: Mapping[str, Value],
        samples_in: tuple[str, ...] | None = None,
    ) -> Iterator[None]:
        """Capture what is computed inside, as a call of the model with these inputs."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this filter is gone: attach a new filter")
        given = samples_in is not None
        roles = Roles(WATCHED, samples_in) if given else self._roles_of_parts
        try:
            self._enter(model, inputs, named, roles)
            yield
        except BaseException:
            self._leave()
            raise
        else:
            self._leave(output=())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let forward passes inside go by as if nobody wanted samples."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def __reduce__(self) -> tuple[Value, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _enter(
        self,
        model: nn.Module,
        args: Value,
        kwargs: Value,
        roles: Roles | None = None,
    ) -> None:
        # A model that calls itself is watched from the outermost call on, and what a
        # checkpoint inside it computes again is seen by the checkpoint's own mode.
        self._here.depth += 1
        if self._here.depth > 1 or self._mode.num_replays:
            return
        wanted = self._wanted_now()
        if torch.is_grad_enabled():
            around, again = None, False
            if hooks_on_saved() is not None:  # of a checkpoint, perhaps
                around, again = checkpoint_frame(), in_checkpoint_recomputation()
                wanted = self._wanted_in_checkpoint(wanted, around, again)
            if wanted is not None and not inside_transform():
                # What torch.func differentiates leaves .grad alone.
                inputs = self._inputs(model, args, kwargs, roles or self._roles)
                self._mode.around, self._mode.trace.again = around, again
                self._mode.roles = roles or self._roles
                self._begin(inputs, wanted)
        elif wanted is not None and in_reentrant_checkpoint():
            # Each call in backward() would be a pass of its own, of other samples.
            raise RuntimeError(reentrant(wanted.name(wanted.parameters[0])))

    def _inputs(
        self, model: nn.Module, args: Value, kwargs: Value, roles: Roles
    ) -> Inputs:
        """The samples among the inputs of a call.

        One tensor alone has the role that it had in the call before this, if it has
        the same shape.
        """
        alone = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(alone, Tensor) or not is_dense(alone):
            alone = None
        if alone is None:
            self._settled = None
        elif self._settled is not None and self._settled[0] == (roles, alone.shape):
            _, num_samples, place, name = self._settled
            return Inputs(num_samples, [(alone, place, name)])
        inputs = inputs_of(
            model, args, kwargs, roles, self.batch_dim, self._last_offset
        )
        if alone is not None:
            ((_, place, name),) = inputs.places
            self._settled = (roles, alone.shape), inputs.num_samples, place, name
        return inputs

    def _begin(self, inputs: Inputs, wanted: Wanted) -> None:
        mode = self._mode
        if self._is_busy:
            raise RuntimeError(
                "two threads call the model with gradients at once, and samples of one "
                "call are captured: evaluate it under torch.no_grad(), or a copy of it"
            )
        if not mode.trace.again:
            for taker in wanted.takers:
                taker.begin(inputs.num_samples)
        if not inputs.num_samples:
            return
        mode.allow_mixing, mode.trace.strict = wanted.allow_mixing, wanted.strict
        mode.trace.begin(inputs, wanted)
        # Of a compiled model, a captured pass runs as it was before it was compiled.
        self._stack.enter_context(uncompiled())
        self._stack.callback(mode.trace.end)
        self._stack.enter_context(mode)
        self._here.watching = self._is_busy = True

    def _leave(
        self, _: object = None, __: object = None, output: object = None
    ) -> None:
        self._here.depth = max(self._here.depth - 1, 0)
        if self._here.depth == 0 and self._here.watching:
            self._here.watching = self._is_busy = False
            with self._stack:
                # A forward pass that failed has no results.
                if output is not None:
                    self._mode.check(output)

    def _wanted_now(self) -> Wanted | None:
        """What those who are active want, the same object as long as they are."""
        active = tuple([taker for taker in self._takers if taker.active])
        if self._num_pauses or not active:
            return None
        if self._wanted is None or self._wanted.takers != active:
            ids = {id(taker) for taker in active}
            errors = [error for taker, error in self._strict.items() if taker in ids]
            self._wanted = Wanted(
                active,
                allow_mixing=ids <= self._allowing and not errors,
                strict=errors[0] if errors else None,
            )
        return self._wanted

    def _wanted_in_checkpoint(
        self, wanted: Wanted | None, around: object, again: bool
    ) -> Wanted | None:
        """The same, if this call of the model is no part of a checkpoint around it.

        One that is computed again is captured as it was the first time, or not.
        """
        if again:
            return next(self.replayed, None)
        if around is not None:
            note_call(self, around, wanted)
        return wanted


def _inert() -> Capture:
    return Capture(nn.Module())


_captures: "weakref.WeakKeyDictionary[nn.Module, Capture]" = weakref.WeakKeyDictionary()


def capture_of(
    model: nn.Module,
    batch_dim: int | None = None,
    samples_in: tuple[str, ...] | None = None,
) -> Capture:
    """The capture that all filters of a model share.

    Args:
        model: The model.
        batch_dim: Where its input holds the samples, if not along the first dimension;
            filters of one model must agree.
        samples_in: The inputs that hold samples; the same holds.
    """
    check_names(model, samples_in)
    found = _captures.get(model)
    if found is None or not found.is_used:
        found = _captures[model] = Capture(model, batch_dim or 0, samples_in)
    elif batch_dim not in (None, found.batch_dim):
        raise ValueError(
            f"another filter of this model takes samples along dimension "
            f"{found.batch_dim} of its input, this one along {batch_dim}: give both "
            "the same batch_dim, or detach() the other"
        )
    elif samples_in not in (None, found.samples_in):
        raise ValueError(
            f"another filter of this model has samples_in={found.samples_in}, this one "
            f"samples_in={samples_in}: give both the same, or detach() the other"
        )
    return found


def capture_paused(model: nn.Module) -> AbstractContextManager[None]:
    """Forward passes inside leave no samples to the filters of this model."""
    found = _captures.get(model)
    return nullcontext() if found is None else found.paused()


class CaptureMode(TorchFunctionMode):
    """Runs a rule wherever samples meet a parameter whose samples are wanted.

    Args:
        model: Whose forward passes they are; it is held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace(model, resume=lambda: self)
        self.allow_mixing = False
        self.roles: Roles | None = None
        # What saw the forward pass, when a checkpoint computes a part of it again.
        self.root = self
        # How many checkpoints are doing so now.
        self.num_replays = 0
        # The checkpoint that all of the forward pass is inside of, if it is.
        self.around: object = None

    def check(self, output: object) -> None:
        """Look at what the model returns."""
        trace = self.trace
        is_guess = len(trace.alignment.names) > 1 or trace.others
        if self.roles is not None and is_guess and not trace.again:
            check_roles(trace, self.roles, output)
        if trace.strict:
            refuse_order(trace, output)
        if trace.by_number and not self.allow_mixing:
            check_order(trace, output)

    def snapshot(self) -> "CaptureMode":
        """One that can go on from here later."""
        twin = copy.copy(self)
        twin.trace = self.trace.snapshot()
        twin.num_replays, twin.around = 0, None
        return twin

    def __torch_function__(
        self,
        func: Callable[..., Value],
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: dict[str, Value] | None = None,
    ) -> Value:
        kwargs = kwargs or {}
        if func in QUESTIONS or self.num_replays:
            return func(*args, **kwargs)
        given = (*args, *kwargs.values()) if kwargs else args
        batched, origins, derived = self.trace.sort(args[:1] if func in LIKE else given)
        if not batched and not derived:
            return func(*args, **kwargs)
        frame = None if hooks_on_saved() is None else checkpoint_frame()
        if frame is not None and frame is not self.around:
            see_again(self, frame, derived)
        call = Call(func, args, kwargs, batched, origins, derived, writes(func))
        if (batched and derived and func not in PASSIVE) or func in ALWAYS:
            out = self._meet(call)
        elif not batched and (frame is not None or self.trace.again):
            # Rows are pulled back through the graph of a derived weight while
            # backward() runs; each time would compute the region once more.
            with unpacked():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self._note(call, args[0] if call.in_place and args else out)
        return out

    def _note(self, call: Call, result: Value) -> None:
        """Remember where the results of an operation hold their samples."""
        try:
            self.trace.note(call, result)
            if self.trace.strict:
                refuse_mix(self.trace, call, result)
        except TypeError as error:
            raise _failed(call, error) from error

    def _meet(self, call: Call) -> Value:
        """The result of an operation in which samples meet a weight, by its rule."""
        func, meets = call.func, bool(call.batched and call.derived)
        if meets and not torch.is_grad_enabled():
            if in_reentrant_checkpoint():
                raise RuntimeError(reentrant(self.trace.name(*call.derived)))
            meets = False
        if meets and not self.allow_mixing:
            admit(self.trace, call)
        if meets or func in ALWAYS:
            return self._by_rule(call)
        return func(*call.args, **call.kwargs)

    def _by_rule(self, call: Call) -> Value:
        trace, rule = self.trace, rule_for(self.trace, call)
        # What a rule does with samples by number, such as padding bags, is no mixing.
        strict, trace.strict = trace.strict, None
        try:
            return rule(trace, call, *call.args, **call.kwargs)
        except TypeError as error:
            if not call.in_place:
                call.plain()  # raises it, if it is the operation's own
            raise _failed(call, error) from error
        except RuntimeError as error:
            if inside_transform():
                problem = "it is inside a transform of torch.func"
                raise trace.lost(problem, *call.derived) from error
            raise
        finally:
            trace.strict = strict


def _failed(call: Call, error: TypeError) -> RuntimeError:
    """A failure of dome's own, as another type.

    Python takes a TypeError of ``a == b`` for "not comparable" and answers False.
    """
    return RuntimeError(
        f"dome cannot follow the samples through {call.func.__name__!r} ({error}): "
        'use samples="microbatch"'
    )
