"""The mode that sees every operation of a forward pass and passes it to its rule."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from dome.samples.rules import ALWAYS, LIKE, PASSIVE, QUESTIONS, rule_for
from dome.samples.sources.recompute import see_again
from dome.samples.store.wanted import Wanted
from dome.samples.tracing.admission import admit, check_order
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.graphs import Graphs
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Call, Place
from dome.samples.tracing.packed import sequences_of
from dome.samples.tracing.refuse import reentrant
from dome.samples.tracing.strict import refuse_mix, refuse_order
from dome.samples.tracing.trace import Trace, writes
from dome.torch_private import checkpoint_frame, in_reentrant_checkpoint


class CaptureMode(TorchFunctionMode):
    """Runs a rule wherever samples meet a parameter whose samples are wanted.

    Args:
        model: Whose forward passes they are; it is held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
        self._has_bags = bool(bags)
        self._last_offset_included = bool(bags) and bags[0].include_last_offset
        self.trace = Trace(model, resume=lambda: self)
        self.allow_mixing = False
        # What saw the forward pass, when a checkpoint computes a part of it again.
        self.root = self
        # How many checkpoints are doing so now.
        self.num_replays = 0
        # The checkpoint that all of the forward pass is inside of, if it is.
        self.around: object = None

    def num_samples(self, inputs: list[Tensor], batch_dim: int) -> int:
        """How many samples lie in the tensors that a model was called with."""
        if not inputs or inputs[0].ndim <= batch_dim:
            raise RuntimeError(
                f"the model's input has no dimension {batch_dim} to find the samples "
                'in; pass tensors to model(...), or use samples="microbatch"'
            )
        offsets = self._offsets(inputs)
        if offsets is not None:
            return len(offsets) - self._last_offset_included
        return inputs[0].shape[batch_dim]

    def begin(
        self, inputs: list[Tensor], batch: int, batch_dim: int, wanted: Wanted
    ) -> None:
        """Start a forward pass with these tensors as the model's input."""
        offsets = self._offsets(inputs)
        self.trace.begin(batch, wanted)
        for t in inputs:
            place: Place | None = _input_axis(t, batch, batch_dim)
            if offsets is not None and t.ndim == 1 and len(t) == len(inputs[0]):
                place = _bags_of(t, offsets, batch)
            if place is not None:
                self.trace.mark_axis(t, place)

    def begin_graphs(self, graphs: Graphs, wanted: Wanted) -> None:
        """Start a forward pass of several graphs, each of which is a sample."""
        self.trace.begin(graphs.num_graphs, wanted)
        self.trace.spaces = graphs.spaces
        for t, place in graphs.places():
            self.trace.mark_axis(t, place)

    def begin_packed(
        self, packed: PackedSequence, inputs: list[Tensor], wanted: Wanted
    ) -> None:
        """Start a forward pass of sequences in one, each of which is a sample."""
        rows = sequences_of(packed)
        self.trace.begin(rows.batch, wanted)
        self.trace.mark_axis(packed.data, rows)
        for t in inputs:
            axis = _input_axis(t, rows.batch, 0)
            if axis is not None and not any(t is part for part in packed):
                self.trace.mark_axis(t, axis)

    def check(self, output: object) -> None:
        """Look at what the model returns."""
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

    def end(self) -> None:
        """Forget the tensors of the forward pass."""
        self.trace.end()

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
        sorted_by = (args[:1], {}) if func in LIKE else (args, kwargs)
        batched, derived = self.trace.sort(*sorted_by)
        if not batched and not derived:
            return func(*args, **kwargs)
        frame = checkpoint_frame()
        if frame is not None and frame is not self.around:
            see_again(self, frame, derived)
        call = Call(func, args, kwargs, batched, derived, writes(func))
        out = self._run(call, frame is not None or self.trace.again)
        result = args[0] if call.in_place and args else out
        self.trace.note(call, result)
        if self.trace.strict:
            refuse_mix(self.trace, call, result)
        return out

    def _run(self, call: Call, in_checkpoint: bool) -> Value:
        """The result of an operation, by its rule where samples meet a parameter."""
        func, derived = call.func, call.derived
        meets = bool(call.batched and derived) and func not in PASSIVE
        if meets and not torch.is_grad_enabled():
            if in_reentrant_checkpoint():
                raise RuntimeError(reentrant(self.trace.name(*derived)))
            meets = False
        if meets and not self.allow_mixing:
            admit(self.trace, call)
        if meets or func in ALWAYS:
            return rule_for(func)(self.trace, call, *call.args, **call.kwargs)
        if in_checkpoint and not call.batched:
            # Rows are pulled back through the graph of a derived weight while
            # backward() runs; each time would compute the region once more.
            with saved_tensors_hooks(_as_it_is, _as_it_is):
                return func(*call.args, **call.kwargs)
        return func(*call.args, **call.kwargs)

    def _offsets(self, inputs: list[Tensor]) -> Tensor | None:
        """The offsets of ``(indices, offsets)``, both 1-D: then a sample is a bag."""
        if not self._has_bags:
            return None
        pair = [t for t in inputs[:2] if t.ndim == 1 and not t.is_floating_point()]
        return pair[1] if len(pair) == 2 else None


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _bags_of(flat: Tensor, offsets: Tensor, batch: int) -> Labels:
    """The bag of every entry of a flat tensor, by the offsets where bags start."""
    places = torch.arange(len(flat), device=flat.device)
    return Labels(torch.searchsorted(offsets[:batch], places, right=True) - 1, batch)


def _input_axis(t: Tensor, batch: int, batch_dim: int) -> Axis | None:
    """Where an input holds the samples, None for one that holds none (a mask, say)."""
    places = [dim for dim, size in enumerate(t.shape) if size == batch]
    if batch_dim in places:
        return Axis(batch_dim, batch)
    return Axis(places[0], batch) if len(places) == 1 else None
