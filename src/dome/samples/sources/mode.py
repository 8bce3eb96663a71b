"""The mode that sees every operation of a forward pass and passes it to its rule."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dome.samples.rules import ALWAYS, LIKE, PASSIVE, QUESTIONS, RULES, fallback
from dome.samples.sources.recompute import see_again
from dome.samples.tracing.admission import (
    admit,
    check_order,
    check_roles,
    refuse_mix,
    refuse_order,
)
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call
from dome.samples.tracing.refuse import reentrant
from dome.samples.tracing.roles import Roles
from dome.samples.tracing.trace import Trace, writes
from dome.torch_private import (
    checkpoint_frame,
    hooks_on_saved,
    in_reentrant_checkpoint,
    unpacked,
)


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
        if self.roles is not None and not self.trace.again:
            check_roles(self.trace, self.roles, output)
        if self.trace.strict:
            refuse_order(self.trace, output)
        if not self.allow_mixing:
            check_order(self.trace, output)

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
            if call.batched and self.trace.alignment.is_open and not self.trace.again:
                self.trace.relate(call, result)
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
            rule = RULES.get(func, fallback)
            try:
                return rule(self.trace, call, *call.args, **call.kwargs)
            except TypeError as error:
                if not call.in_place:
                    call.plain()  # raises it, if it is the operation's own
                raise _failed(call, error) from error
        return func(*call.args, **call.kwargs)


def _failed(call: Call, error: TypeError) -> RuntimeError:
    """A failure of dome's own, as another type.

    Python takes a TypeError of ``a == b`` for "not comparable" and answers False.
    """
    return RuntimeError(
        f"dome cannot follow the samples through {call.func.__name__!r} ({error}): "
        'use samples="microbatch"'
    )
