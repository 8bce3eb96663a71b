"""Per-sample gradients as a function, through a capture of its own."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.calls import LossCall, LossFn
from dome.samples.capture import Capture, capture_paused
from dome.samples.store.rows import Rows
from dome.samples.tracing.inputs import check_names, declared
from dome.samples.tracing.nested import Value
from dome.samples.tracing.refuse import check_capturable

REDUCTIONS = ("mean", "sum")


@overload
def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFn | None,
    x: Value = None,
    y: Value = None,
    *,
    loss_reduction: str = "mean",
    samples_in: str | Sequence[str] | None = None,
    as_dict: Literal[False] = False,
    **inputs: Value,
) -> Tensor: ...


@overload
def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFn | None,
    x: Value = None,
    y: Value = None,
    *,
    loss_reduction: str = "mean",
    samples_in: str | Sequence[str] | None = None,
    as_dict: Literal[True],
    **inputs: Value,
) -> dict[str, Tensor]: ...


def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFn | None,
    x: Value = None,
    y: Value = None,
    *,
    loss_reduction: str = "mean",
    samples_in: str | Sequence[str] | None = None,
    as_dict: bool = False,
    **inputs: Value,
) -> Tensor | dict[str, Tensor]:
    """Gradient of each sample's share of the batch loss, by all trainable parameters.

        loss(model(x), y) = Σ share[b],   G[b] = B ∇ share[b]

    Of a plain mean that is the gradient of the sample's own loss, ∇ loss(model(x[b]),
    y[b]). Where the loss weighs samples (``ignore_index``, class weights), or couples
    them, so does the share: it is the part of the batch loss's gradient that goes
    through the sample's own results. Leaves ``.grad`` alone, and what filters of this
    model have captured. Batch norm in training mode is refused.

    Args:
        model: The network; the columns follow its ``parameters()``.
        loss_fn: Maps a batch of predictions and targets to a scalar, or predictions
            alone if y is not given; None if the model returns its loss.
        x: Inputs, shape (B, ...); a tuple of them, or a dictionary of named ones.
        y: Targets, shape (B, ...). With ``loss_fn=None`` the model's last input.
        loss_reduction: "mean" as above, "sum" without the factor B.
        samples_in: Which inputs hold samples, as in ``dome.attach``.
        as_dict: Return the rows by parameter.
        **inputs: More inputs by their names.

    Returns:
        G, one flat gradient a row, shape (B, D). With ``as_dict`` a dictionary from the
        name of each parameter to its gradients, shape (B, *parameter).
    """
    if loss_reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction must be one of {REDUCTIONS}, got {loss_reduction!r}"
        )
    names = declared(samples_in)
    check_names(model, names)
    call = LossCall.of(loss_fn, x, y, inputs)
    rows = sample_shares(model, lambda: call.loss(model), names)
    G = rows * len(rows) if loss_reduction == "mean" else rows
    return by_name(G, Layout(model)) if as_dict else G


def by_name(G: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Rows (B, D) by parameter, each (B, *parameter)."""
    return {
        slot.name: G[:, slot.start : slot.stop].view(len(G), *slot.shape)
        for slot in layout.slots
    }


def sample_shares(
    model: nn.Module,
    compute_loss: Callable[[], Tensor],
    samples_in: tuple[str, ...] | None = None,
) -> Tensor:
    """Gradients of the samples' shares of a loss, rows (B, D) that sum to its gradient.

    Args:
        model: The network.
        compute_loss: Calls the model and returns a scalar.
        samples_in: The names of the inputs that hold samples.
    """
    layout = Layout(model)
    check_capturable(model)
    rows, capture = Rows(layout, functional=True), Capture(model, samples_in=samples_in)
    with capture_paused(model):
        capture.subscribe(rows)
        try:
            with torch.enable_grad():
                loss = compute_loss()
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss must be one number, got shape {tuple(loss.shape)}: add "
                    'its terms up or average them, as reduction="mean" does'
                )
            grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
            capture.questions.answer()
            G = rows.take(grads)
        finally:
            capture.unsubscribe(rows)
    if G is None:
        raise RuntimeError("the loss does not depend on any trainable parameter")
    return G
