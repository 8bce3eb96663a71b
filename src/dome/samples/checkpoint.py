"""Activation checkpoints that are not reentrant: what they compute again is seen again.

    forward()    region ──► nodes of the rules, their saved tensors dropped
    backward()   region once more, under the same capture ──► the same tensors, saved in
                 the same order ──► the nodes of forward() write the rows

A checkpoint keeps the function that computes its region once more. It is replaced by
one that first brings back what was known of the samples when the region began. The
graph that comes of the second time is thrown away, by torch and by us.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dome.samples.tracing.nested import Value
from dome.samples.tracing.refuse import not_understood
from dome.torch_private import checkpoint_arguments, uncompiled

if TYPE_CHECKING:
    from dome.samples.capture import Capture, CaptureMode
    from dome.samples.store.sink import Wanted

# A class of torch that is private.
Frame = Any


class Region:
    """Computes a region inside the model once more, seen as the first time.

    Args:
        mode: What sees the forward pass, in the state in which the region begins.
        frame: The checkpoint.
        args: What its function was called with.
    """

    def __init__(
        self, mode: "CaptureMode", frame: Frame, args: tuple[Value, ...]
    ) -> None:
        self.mode = mode
        self.inner: Callable[..., None] = frame.recompute_fn
        self._then = mode.snapshot()
        self._origins = [
            self._then.trace.origin(t) if isinstance(t, Tensor) else None for t in args
        ]

    def __call__(self, *inputs: Value) -> None:
        """What torch calls in backward(), with its own copies of ``args`` at the end.

        In torch 2.8 keyword arguments come first, as a dictionary.
        """
        again = self._then.snapshot()
        again.trace.resume = lambda: again
        args = inputs[len(inputs) - len(self._origins) :]
        for t, origin in zip(args, self._origins, strict=True):
            if isinstance(t, Tensor):
                again.trace.mark(t, origin)
        # backward() inside watch(...): there the first mode is still looking.
        self.mode.root.num_replays += 1
        try:
            with uncompiled(), again:
                self.inner(*inputs)
        finally:
            self.mode.root.num_replays -= 1


class Calls:
    """Computes a region around calls of the model once more, seen as the first time.

    Args:
        capture: Of the model.
        frame: The checkpoint.
    """

    def __init__(self, capture: "Capture", frame: Frame) -> None:
        self.capture = capture
        self.inner: Callable[..., None] = frame.recompute_fn
        # Whose samples the calls were captured for, in order.
        self.wanted: list[Wanted | None] = []

    def __call__(self, *inputs: Value) -> None:
        """What torch calls in backward()."""
        before, self.capture.replayed = self.capture.replayed, iter(self.wanted)
        try:
            self.inner(*inputs)
        finally:
            self.capture.replayed = before


def see_again(mode: "CaptureMode", frame: Frame, derived: list[Tensor]) -> None:
    """Let a region inside the model be seen when it is computed once more.

    Args:
        mode: What sees the region now.
        frame: Its checkpoint, which it has just entered, or entered before.
        derived: Weights that are used in it, to name one.
    """
    if any(isinstance(f, Region) and f.mode is mode for f in _wrapped(frame)):
        return
    args = checkpoint_arguments(frame)
    if args is None:
        raise RuntimeError(not_understood(mode.trace.name(*derived)))
    frame.recompute_fn = Region(mode, frame, args)


def note_call(capture: "Capture", frame: Frame, wanted: "Wanted | None") -> None:
    """Remember a call of the model inside a region that will be computed once more."""
    for calls in _wrapped(frame):
        if isinstance(calls, Calls) and calls.capture is capture:
            calls.wanted.append(wanted)
            return
    calls = Calls(capture, frame)
    calls.wanted.append(wanted)
    frame.recompute_fn = calls


def _wrapped(frame: Frame) -> Iterator[Region | Calls]:
    """What we have put around the function of a checkpoint: one for each capture."""
    function = frame.recompute_fn
    while isinstance(function, Region | Calls):
        yield function
        function = function.inner
