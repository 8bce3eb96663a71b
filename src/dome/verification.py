"""``verify``: are the captured samples what one backward a sample gives?

Shapes: G (B, D), one sample a row, parameters one after the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dome.parameters import Layout, Slot
from dome.samples.calls import LossCall, LossFn
from dome.samples.functional import sample_shares
from dome.samples.literal import Apart, shares, weighted_losses
from dome.samples.tracing.inputs import Roles, Signature, check_names, declared
from dome.samples.tracing.nested import Value
from dome.samples.tracing.refuse import check_capturable
from dome.torch_private import rounding

# Two ways to sum the same numbers differ by a few roundings of the largest one.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
# The same where products keep ten or eight bits: two layers differ by half a rounding.
COARSE = 8
# A gradient that is zero but for rounding (a key's bias, which softmax does not see;
# a bias before a normalisation) deviates by less than this many roundings of the
# largest gradient of any parameter; 6 is the most that models of the zoo showed.
ROUNDINGS = 32


@dataclass(frozen=True, slots=True)
class ParameterError:
    """How far the captured samples of one parameter are off.

    Attributes:
        name: The parameter.
        error: Largest deviation over the largest entry of any sample. A gradient that
            is zero but for rounding is measured against that of the whole model.
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
                "gradients agree with one backward per sample (largest relative "
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
    loss_fn: LossFn | None,
    x: Value = None,
    y: Value = None,
    *,
    samples_in: str | Sequence[str] | None = None,
    **inputs: Value,
) -> Report:
    """Compare captured samples with one forward and backward a sample.

    A sample's gradient is that of its share of the batch loss: the loss as it is of the
    whole batch, through the results of that sample alone. So a loss that weighs samples
    (``ignore_index``, class weights) or sums them is compared as it is. The model is
    put into evaluation mode for it, so that dropout does not make the two differ, and
    back. ``.grad`` is not touched.

    Args:
        model: The model to check.
        loss_fn: Maps predictions and targets to a scalar, or predictions alone if y is
            not given; None if the model returns its loss. Then a share is compared up
            to the weight that the sample has in the batch.
        x: Inputs, shape (B, ...); a tuple of them, or a dictionary of named ones.
        y: Targets, shape (B, ...). With ``loss_fn=None`` the model's last input.
        samples_in: Which inputs hold samples, as in ``dome.attach``.
        **inputs: More inputs by their names.
    """
    check_capturable(model)  # in the mode it is trained in
    layout = Layout(model)
    names = declared(samples_in)
    check_names(model, names)
    call = LossCall.of(loss_fn, x, y, inputs)
    batch = Apart.of(call, Roles(Signature.of(model), names))
    extra: tuple[ParameterError, ...] = ()
    with _evaluating(model):
        captured = sample_shares(model, lambda: call.loss(model), names)
        if loss_fn is None:
            literal, missed = weighted_losses(model, layout, batch, captured)
            extra = (ParameterError("(the loss itself)", missed),)
        else:
            literal = shares(model, layout, batch)
    errors = tuple(
        ParameterError(slot.name, _deviation(captured, literal, slot))
        for slot in layout.slots
    )
    # Where products of float32 numbers keep fewer digits, so does what is compared.
    coarse = COARSE * rounding(captured)
    tolerance = max(TOLERANCE[layout.dtype], coarse)
    return Report((*errors, *extra), tolerance, len(captured))


def _deviation(captured: Tensor, literal: Tensor, slot: Slot) -> float:
    """Largest deviation, over the largest entry or over what rounding explains."""
    columns = slice(slot.start, slot.stop)
    deviation = (captured[:, columns] - literal[:, columns]).abs().max()
    rounding = ROUNDINGS * torch.finfo(literal.dtype).eps * literal.abs().max()
    floor = rounding / TOLERANCE[literal.dtype]
    scale = torch.maximum(literal[:, columns].abs().max(), floor)
    return float(deviation / scale if scale > 0 else deviation)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
