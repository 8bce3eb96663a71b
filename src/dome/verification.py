"""``verify``: are the captured samples what one backward a sample gives?

Shapes: G (B, D), one sample a row, parameters one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dome.parameters import Layout, Slot
from dome.samples import per_sample_gradients
from dome.samples.tracing.refuse import check_capturable

# Two ways to sum the same numbers differ by a few roundings of the largest one.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True, slots=True)
class ParameterError:
    """How far the captured samples of one parameter are off.

    Attributes:
        name: The parameter.
        error: Largest deviation over the largest entry of any sample.
    """

    name: str
    error: float


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` found, one entry a parameter.

    Attributes:
        errors: In ``model.parameters()`` order.
        tolerance: Relative deviation that rounding explains.
        num_samples: How many samples were compared.
    """

    errors: tuple[ParameterError, ...]
    tolerance: float
    num_samples: int

    @property
    def ok(self) -> bool:
        """Whether every parameter agrees."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[ParameterError, ...]:
        """The parameters that do not agree, worst first."""
        found = [e for e in self.errors if not e.error <= self.tolerance]
        return tuple(sorted(found, key=lambda e: -e.error))

    def __str__(self) -> str:
        if self.ok:
            worst = max(e.error for e in self.errors)
            return (
                f"{len(self.errors)} parameters, {self.num_samples} samples: captured "
                f"gradients agree with one backward a sample (largest relative "
                f"deviation {worst:.1e}, allowed {self.tolerance:.0e})"
            )
        lines = [
            f"{len(self.wrong)} of {len(self.errors)} parameters differ from one "
            f"backward a sample (relative deviation, allowed {self.tolerance:.0e}):"
        ]
        lines += [f"  {e.name}: {e.error:.1e}" for e in self.wrong[:10]]
        lines.append('samples="microbatch" works with every layer')
        return "\n".join(lines)


def verify(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Report:
    """Compare captured samples with one forward and backward a sample.

    The model is put into evaluation mode for it, so that dropout does not make the two
    differ, and back. ``.grad`` is not touched.

    Args:
        model: The model to check.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        x: Inputs, shape (B, ...).
        y: Targets, shape (B, ...).
    """
    check_capturable(model)  # in the mode it is trained in
    layout = Layout(model)
    with _evaluating(model):
        captured = per_sample_gradients(model, loss_fn, x, y)
        literal = torch.stack(
            list(_one_backward_a_sample(model, layout, loss_fn, x, y))
        )
    errors = tuple(
        ParameterError(slot.name, _deviation(captured, literal, slot))
        for slot in layout.slots
    )
    return Report(errors, TOLERANCE[layout.dtype], len(captured))


def _deviation(captured: Tensor, literal: Tensor, slot: Slot) -> float:
    columns = slice(slot.start, slot.stop)
    deviation = (captured[:, columns] - literal[:, columns]).abs().max()
    largest = literal[:, columns].abs().max()
    # A parameter without any gradient is measured against the whole.
    scale = largest if largest > 0 else literal.abs().max()
    return float(deviation / scale if scale > 0 else deviation)


def _one_backward_a_sample(
    model: nn.Module,
    layout: Layout,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Iterator[Tensor]:
    for b in range(len(x)):
        loss = loss_fn(model(x[b : b + 1]), y[b : b + 1])
        grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
        yield torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for p, g in zip(layout.parameters, grads, strict=True)
            ]
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
