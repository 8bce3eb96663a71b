"""Samples from a model that Opacus hooks already: its ``grad_sample`` read as it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.protocol import NONE
from dome.samples.store.gradients import Gradients


def carries_grad_sample(model: nn.Module) -> bool:
    """Whether Opacus' hooks are on the model."""
    return any(hasattr(p, "grad_sample") for p in model.parameters())


class OpacusSamples:
    """Rows from the ``grad_sample`` attribute of each parameter.

    Args:
        model: A ``GradSampleModule``, or a model with ``GradSampleHooks`` on it.
        layout: The tracked parameters.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._active = True
        self.samples_per_row = 1.0
        self._since_step = Gradients(layout.parameters)

    def arm(self, active: bool) -> None:
        """Switch Opacus' hooks, where the model is wrapped, and start afresh."""
        self._active = active
        self.discard()
        self._switch("enable_hooks" if active else "disable_hooks")

    def watch(
        self,
        inputs: Sequence[object],
        named: Mapping[str, object] = NONE,
        samples_in: tuple[str, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """Ignored: Opacus' hooks are on every layer, whoever calls it."""
        del inputs, named, samples_in
        return nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switch Opacus' hooks off, where the model is wrapped."""
        self._switch("disable_hooks")
        try:
            yield
        finally:
            self._switch("enable_hooks")

    def expect(self, loss: Tensor) -> None:
        """Ignored: Opacus' hooks report from each layer's own backward."""

    def take(self, due: bool = True) -> Tensor | None:
        """The rows (B, D) in all ``grad_sample``; see the protocol."""
        captured = [_batches(p) for p in self._layout.parameters]
        sizes = next(
            ([len(g) for g in batches] for batches in captured if batches), None
        )
        if sizes is None:
            if due and self._active and self._since_step.came():
                raise RuntimeError(
                    "Opacus left no grad_sample for this step, although .grad was "
                    "filled: its hooks are off or were removed, or a forward pass had "
                    "no backward pass. Switch them on, evaluate under torch.no_grad(), "
                    "or attach to the model without them"
                )
            return None
        self.discard()
        like = self._layout.parameters[0]
        rows = like.new_zeros((sum(sizes), self._layout.dim), requires_grad=False)
        for batches, slot in zip(captured, self._layout.slots, strict=True):
            if batches:
                columns = rows[:, slot.start : slot.stop]
                columns.copy_(torch.cat(batches).view_as(columns))
        return self._unscaled(rows, sizes)

    def discard(self) -> None:
        """Clear ``grad_sample``."""
        for p in self._layout.parameters:
            if hasattr(p, "grad_sample"):
                p.grad_sample = None
        self._since_step.note()

    def _switch(self, name: str) -> None:
        """Call a switch of the wrapper, if there is one."""
        switch = getattr(self._model, name, None)
        if switch is not None:
            switch()

    def detach(self) -> None:
        """Leave the model alone: the hooks are Opacus' own."""

    def _unscaled(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Rows that sum to ``.grad``: Opacus multiplies those of a mean loss by B."""
        counts = rows.new_tensor([float(n) for n in sizes for _ in range(n)])
        mean = rows / counts[:, None]
        reduction = getattr(self._model, "loss_reduction", None)
        if reduction is None:
            # Hooks without a wrapper do not tell: the gradient itself does.
            total = self._layout.gather()
            near = torch.dist(mean.sum(0), total) <= torch.dist(rows.sum(0), total)
            reduction = "mean" if near else "sum"
        return mean if reduction == "mean" else rows


def _batches(p: nn.Parameter) -> list[Tensor]:
    """The samples of a parameter, one tensor for each accumulated batch."""
    found = getattr(p, "grad_sample", None)
    if found is None:
        return []
    return found if isinstance(found, list) else [found]
