"""Per-sample gradients from the user's own ``backward()``, whatever the model is.

While the model's forward runs, a ``TorchFunctionMode`` sees every operation. Where
samples meet a tracked parameter, a rule runs the operation as an autograd function
whose backward writes per-sample gradients (B, *parameter) into the rows (B, D) and
returns their sum, so that the batch gradient is not computed a second time. The model
is not wrapped and nothing is hung on its parameters.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dome.parameters import Layout
from dome.samples.rows import Rows
from dome.samples.rules import ALWAYS, PASSIVE, QUESTIONS, rule_for
from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, tensors, unpacked
from dome.samples.tracing.refuse import check_capturable, is_checkpointed, recomputed
from dome.samples.tracing.trace import Call, Trace, writes
from dome.torch_private import forward_pre_hooks


class PerSample:
    """One row for each sample of a batch: the gradient of its term of the loss.

    The model must treat samples independently: batch norm in training mode does not.

    Args:
        model: Hooks are registered on it, and nothing else.
        layout: The tracked parameters.
        batch_dim: The dimension of the model's input that enumerates the samples;
            the first, if not given.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, *, batch_dim: int | None = None
    ) -> None:
        check_capturable(model)
        self.rows = Rows(layout)
        self._model = weakref.ref(model)
        self._batch_dim = batch_dim or 0
        self._active = True
        self._depth = 0
        self._stack = ExitStack()
        bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
        self._mode = _Watch(model, layout, self.rows, bags)
        self._handles = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def arm(self, active: bool) -> None:
        """Choose whether forward passes from now on are captured."""
        self._active = active

    @contextmanager
    def watch(self, inputs: object) -> Iterator[None]:
        """Capture what is computed inside, as a call of the model with these inputs."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this filter is gone: attach a new filter")
        try:
            self._enter(model, (inputs,), {})
            yield
        finally:
            self._leave()

    def expect(self, loss: Tensor) -> None:
        """Nothing to do: what was captured reports itself."""

    def take(self) -> Tensor | None:
        """The rows (B, D) of every backward pass since the last call."""
        return self.rows.take()

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""
        self.rows.discard()

    def detach(self) -> None:
        """Remove the hooks. Graphs already built still hold what they captured."""
        for handle in self._handles:
            handle.remove()
        self.discard()

    def __reduce__(self) -> tuple[Value, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _enter(self, model: nn.Module, args: Value, kwargs: Value) -> None:
        # A model that calls itself is watched from the outermost call on.
        self._depth += 1
        wanted = self._active and torch.is_grad_enabled()
        if self._depth > 1 or not wanted or _newest(model) is not self:
            return
        self.rows.drop_stale()
        if not self._mode.begin(unpacked((args, kwargs)), self._batch_dim):
            return  # no samples, no rows: the last of uneven batches
        self.rows.forward_seen = True
        self._stack.callback(self._mode.end)
        self._stack.enter_context(self._mode)

    def _leave(self, *_: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._stack.close()


def _newest(model: nn.Module) -> object:
    """The source attached last: the functional form goes before the one that stays."""
    owners = (getattr(h, "__self__", None) for h in forward_pre_hooks(model))
    return [owner for owner in owners if isinstance(owner, PerSample)][-1]


def _inert() -> PerSample:
    source = object.__new__(PerSample)
    source._active, source._depth, source._stack = False, 0, ExitStack()
    return source


class _Watch(TorchFunctionMode):
    """Sees every operation of a forward pass and passes it to its rule."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        rows: Rows,
        bags: list[nn.EmbeddingBag],
    ) -> None:
        super().__init__()
        self._bags = bags
        self._trace = Trace(model, layout, rows, resume=lambda: self)

    def begin(self, inputs: object, batch_dim: int) -> bool:
        """Start a forward pass whose input tensors lie somewhere inside ``inputs``.

        Returns:
            Whether there is anything to watch: a batch may have no samples.
        """
        found = list(tensors(inputs))
        if not found or found[0].ndim <= batch_dim:
            raise RuntimeError(
                f"the model's input has no dimension {batch_dim} to find the samples "
                'in; pass tensors to model(...), or use samples="microbatch"'
            )
        batch = found[0].shape[batch_dim]
        offsets = _offsets(found) if self._bags else None
        if offsets is not None:
            batch = len(offsets) - self._bags[0].include_last_offset
        if batch == 0:
            return False
        self._trace.batch = batch
        for t in found:
            axis = _input_axis(t, batch, batch_dim)
            if axis is not None or t is offsets:
                self._trace.mark_axis(t, axis)
        return True

    def end(self) -> None:
        """Forget the tensors of the forward pass."""
        self._trace.end()

    def __torch_function__(
        self,
        func: Callable[..., Value],
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: dict[str, Value] | None = None,
    ) -> Value:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        batched, derived = self._trace.sort(args, kwargs)
        if not batched and not derived:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs, batched, derived, writes(func))
        meets = batched and derived and func not in PASSIVE and torch.is_grad_enabled()
        if meets or func in ALWAYS:
            if is_checkpointed():
                raise RuntimeError(recomputed(self._trace.name(*derived)))
            out = rule_for(func)(self._trace, call, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self._trace.note(call, args[0] if call.in_place and args else out)
        return out


def _input_axis(t: Tensor, batch: int, batch_dim: int) -> Axis | None:
    """Where an input holds the samples, None for one that holds none (a mask, say)."""
    places = [dim for dim, size in enumerate(t.shape) if size == batch]
    if batch_dim in places:
        return Axis(batch_dim, batch)
    return Axis(places[0], batch) if len(places) == 1 else None


def _offsets(inputs: list[Tensor]) -> Tensor | None:
    """The offsets of ``(indices, offsets)``, both 1-D: then a sample is a bag."""
    pair = [t for t in inputs[:2] if t.ndim == 1 and not t.is_floating_point()]
    return pair[1] if len(pair) == 2 else None
