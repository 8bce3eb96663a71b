"""The contract of a rule, in a model that uses its operation."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dome.filter import GradientFilter
from dome.samples import per_sample_gradients
from dome.samples.calls import LossFn
from dome.samples.tracing.nested import Value, all_tensors
from dome.testing.judge import must, must_equal
from dome.verification import verify


def check_rule(model: nn.Module, *inputs: Value, loss_fn: LossFn | None = None) -> None:
    """Raise ``AssertionError`` unless samples taken by a rule are right.

    They are compared with one backward a sample, and the model's results and gradients
    with those that it has without dome. So are a batch of one sample, a frozen
    parameter, and the model in a checkpoint. Best in float64.

    Args:
        model: Calls the operation with one of its parameters; the smaller the better.
        *inputs: What it is called with, samples first, at least two.
        loss_fn: Maps its results to a scalar; the mean of squares if not given.
    """
    loss_of = loss_fn or _mean_square
    report = verify(model, loss_of, inputs)
    must(report.ok, f"its rows are not those of one backward a sample: {report}")

    plain = all_tensors(model(*inputs))
    rows = per_sample_gradients(model, loss_of, inputs, loss_reduction="sum")
    grads, seen = _gradients(model, loss_of, inputs), GradientFilter(model, 1)
    must_equal(all_tensors(model(*inputs)), plain, "dome changes the model's results")
    seen.detach()
    close = torch.finfo(rows.dtype).eps ** 0.5  # half of the digits
    torch.testing.assert_close(rows.sum(0), grads, rtol=close, atol=close)

    again = per_sample_gradients(_Inside(model), loss_of, inputs, loss_reduction="sum")
    must_equal(again, rows, "in a checkpoint rows differ")

    one = tuple(_first(x) for x in inputs)
    must(verify(model, loss_of, one).ok, "a batch of one sample has other rows")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if len(parameters) > 1:
        parameters[0].requires_grad_(False)
        frozen = verify(model, loss_of, inputs)
        parameters[0].requires_grad_(True)
        must(frozen.ok, f"with a frozen parameter: {frozen}")


class _Inside(nn.Module):
    """A model in a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Value) -> Value:
        return checkpoint(self.model, *inputs, use_reentrant=False)


def _mean_square(results: Value) -> Tensor:
    squares = [t.square().flatten(1).sum(1) for t in all_tensors(results)]
    return torch.stack(squares).sum(0).mean()


def _gradients(model: nn.Module, loss_of: LossFn, inputs: tuple[Value, ...]) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss_of(model(*inputs)), parameters)
    return torch.cat([g.flatten() for g in grads])


def _first(x: Value) -> Value:
    return x[:1] if isinstance(x, Tensor) else x
