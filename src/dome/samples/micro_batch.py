"""Micro-batches as samples: what each ``backward()`` adds to ``.grad`` is one row.

Works with any model, batch norm and torch.compile included, and costs one copy of the
gradient for each call of ``backward()``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.protocol import NONE
from dome.samples.store.gradients import Gradients, Leaves, Reach, read
from dome.samples.tracing.nested import Value, all_tensors
from dome.torch_private import current_graph_task, is_compiled, when_backward_ends


class MicroBatch:
    """One row for each ``backward()`` call since the last step.

    Also for a second one through the same graph; several forward passes before one
    ``backward()`` are one row.

    Args:
        model: A forward hook is registered on it, and nothing else.
        layout: The tracked parameters.
        batch_dim: The dimension of the model's input that enumerates the samples of the
            data; the first, if not given.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, *, batch_dim: int | None = None
    ) -> None:
        self._layout = layout
        self._batch_dim = batch_dim or 0
        # Samples of the data in the newest forward pass, and behind each row.
        self._size, self._sizes = math.nan, list[float]()
        self.samples_per_row = math.nan  # on average, of those taken last
        self._leaves = Leaves(layout.parameters)
        self._active = True
        self._excused = False
        self._rows: list[Tensor] = []
        self._backward = -1
        self._since_backward = Gradients(layout.parameters)
        self._since_step = Gradients(layout.parameters)
        # How many rows are void if this number on the device is 0.
        self._doubts: list[tuple[int, Tensor]] = []
        # What was in .grad before: nothing, something, or what this number says.
        self._held: bool | Tensor = True
        self._before: Tensor | None = None
        hook: Value = self._watch
        if any(is_compiled(module) for module in model.modules()):
            hook = torch.compiler.disable(hook)
        self._handle = model.register_forward_hook(hook, with_kwargs=True)

    def arm(self, active: bool) -> None:
        """Choose whether backward passes of forwards from now on are captured."""
        self._active = active
        self._since_step.note()

    def watch(
        self,
        inputs: Sequence[object],
        named: Mapping[str, object] = NONE,
        samples_in: tuple[str, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """Ignored: a micro-batch is what one ``backward()`` adds, however it began."""
        del inputs, named, samples_in
        return nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no row for the backward passes of forwards inside."""
        active, self._active = self._active, False
        self._excused = True
        try:
            yield
        finally:
            self._active = active

    def expect(self, loss: Tensor) -> None:
        """Take what ``backward()`` adds to ``.grad`` from this tensor on."""
        self._look_at(loss)

    def take(self, due: bool = True) -> Tensor | None:
        """One row (N, D) for each backward pass; see the protocol."""
        rows, doubts = self._rows, self._doubts
        missing = due and self._active and not (rows or self._excused)
        if missing and self._since_step.came():
            raise RuntimeError(
                "no backward pass of this model was seen for this step, although .grad "
                "was filled: the model was not called as model(...). Call the model "
                "itself, or grad_filter.expect_backward(loss) before loss.backward()"
            )
        sizes = self._sizes
        self.discard()
        (norms,) = read([norm for _, norm in doubts])
        void = [
            num for (num, _), (norm,) in zip(doubts, norms, strict=True) if not norm
        ]
        first = max(void, default=0)
        rows, sizes = rows[first:], sizes[first:]
        self.samples_per_row = sum(sizes) / len(sizes) if sizes else math.nan
        return torch.stack(rows) if rows else None

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""
        self._forget_rows()
        self._excused = False
        self._since_step.note()

    def detach(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self.discard()

    def __reduce__(self) -> tuple[Value, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _watch(self, _: nn.Module, args: Value, kwargs: Value, output: Value) -> None:
        self._look_at(output)
        if self._active and torch.is_grad_enabled():
            self._size = num_samples_in((args, kwargs), self._batch_dim)

    def _look_at(self, output: Value) -> None:
        if not self._active or not torch.is_grad_enabled():
            return
        self._held = self._holds()
        for t in all_tensors(output):
            if t.requires_grad:
                t.register_hook(self._begin)

    def _holds(self) -> bool | Tensor:
        """Whether ``.grad`` holds anything; rows of what was thrown away are void."""
        if self._since_backward.are_missing:
            self._forget_rows()
            return False
        if not self._since_backward.may_be_zeroed:
            return True
        norm = self._since_backward.largest_norm()
        self._doubts.append((len(self._rows), norm))
        self._since_backward.note()
        return norm

    def _begin(self, _: Tensor) -> None:
        """The first gradient of a backward pass has arrived at the model's output."""
        fills = any(
            self._leaves.reach(p) is Reach.FILLS for p in self._layout.parameters
        )
        if self._backward == current_graph_task() or not fills:
            return
        self._backward = current_graph_task()
        held, self._held = self._held, True
        # A penalty on the parameters may have reached .grad already: where the forward
        # pass found it empty, all of it belongs to this sample.
        self._before = None
        if self._holds() is not False and held is not False:
            before = self._layout.gather()
            self._before = before if held is True else before * (held != 0)
        when_backward_ends(self._end)

    def _end(self) -> None:
        after = self._layout.gather()
        self._rows.append(after if self._before is None else after - self._before)
        self._sizes.append(self._size)
        self._before = None
        self._since_backward.note()

    def _forget_rows(self) -> None:
        self._rows, self._sizes, self._doubts = [], [], []


def num_samples_in(inputs: Value, batch_dim: int = 0) -> float:
    """How many samples a call of a model is about; NaN where no tensor tells."""
    sizes = (t.shape[batch_dim] for t in all_tensors(inputs) if t.ndim > batch_dim)
    return float(next(sizes, math.nan))


def _inert() -> MicroBatch:
    source = object.__new__(MicroBatch)
    source._active = False
    return source
