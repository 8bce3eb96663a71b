"""Micro-batches as samples: what each ``backward()`` adds to ``.grad`` is one row.

Works with any model, batch norm and torch.compile included, and costs one copy of the
gradient for each call of ``backward()``.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.tracing.engine import Leaves, Reach, current_backward, has_gradient
from dome.samples.tracing.nested import Value, tensors, unpacked
from dome.torch_private import is_compiled, when_backward_ends


class MicroBatch:
    """One row for each ``backward()`` call since the last step.

    Args:
        model: A forward hook is registered on it, and nothing else.
        layout: The tracked parameters.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._leaves = Leaves()
        self._active = True
        self._rows: list[Tensor] = []
        self._backward = -1
        self._clean = False
        self._before: Tensor | None = None
        hook: Value = self._watch
        if any(is_compiled(module) for module in model.modules()):
            hook = torch.compiler.disable(hook)
        self._handle = model.register_forward_hook(hook)

    def arm(self, active: bool) -> None:
        """Choose whether backward passes of forwards from now on are captured."""
        self._active = active

    def watch(self, inputs: object) -> AbstractContextManager[None]:
        """Nothing to do: a micro-batch is told by its ``backward()``."""
        del inputs
        return nullcontext()

    def expect(self, loss: Tensor) -> None:
        """Take what ``backward()`` adds to ``.grad`` from this tensor on."""
        self._look_at(loss)

    def take(self) -> Tensor | None:
        """One row (N, D) for each backward pass; see the protocol."""
        rows, self._rows = self._rows, []
        return torch.stack(rows) if rows else None

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""
        self._rows = []

    def detach(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self.discard()

    def __reduce__(self) -> tuple[Value, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _watch(self, _: nn.Module, __: Value, output: Value) -> None:
        self._look_at(output)

    def _look_at(self, output: Value) -> None:
        if not self._active or not torch.is_grad_enabled():
            return
        self._clean = not any(has_gradient(p) for p in self._layout.parameters)
        if self._clean:
            self._rows = []
        for t in tensors(unpacked(output)):
            if t.requires_grad:
                t.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        """The first gradient of a backward pass has arrived at the model's output."""
        fills = any(
            self._leaves.reach(p) is Reach.FILLS for p in self._layout.parameters
        )
        if self._backward == current_backward() or not fills:
            return
        self._backward = current_backward()
        if not any(has_gradient(p) for p in self._layout.parameters):
            self._rows, self._clean = [], True
        # A penalty on the parameters may have reached .grad already: where the forward
        # pass found it empty, all of it belongs to this sample.
        self._before = None if self._clean else self._layout.gather()
        self._clean = False
        when_backward_ends(self._end)

    def _end(self) -> None:
        after = self._layout.gather()
        self._rows.append(after if self._before is None else after - self._before)


def _inert() -> MicroBatch:
    source = object.__new__(MicroBatch)
    source._active = False
    return source
