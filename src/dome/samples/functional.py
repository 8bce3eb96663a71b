"""Per-sample gradients as a function, through a capture of its own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.capture import Capture, capture_paused
from dome.samples.store.rows import Rows
from dome.samples.tracing.refuse import check_capturable

REDUCTIONS = ("mean", "sum")


def per_sample_gradients(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    loss_reduction: str = "mean",
) -> Tensor:
    """Gradient of each sample's share of the batch loss, by all trainable parameters.

        loss(model(x), y) = Σ share[b],   G[b] = B ∇ share[b]

    Of a plain mean that is the gradient of the sample's own loss, ∇ loss(model(x[b]),
    y[b]). Where the loss weighs samples (``ignore_index``, class weights), or couples
    them, so does the share: it is the part of the batch loss's gradient that goes
    through the sample's own results. Leaves ``.grad`` alone, and what filters of this
    model have captured. Batch norm in training mode is refused.

    Args:
        model: The network; the columns follow its ``parameters()``.
        loss_fn: Maps a batch of predictions and targets to a scalar.
        x: Inputs, shape (B, ...).
        y: Targets, shape (B, ...).
        loss_reduction: "mean" as above, "sum" without the factor B.

    Returns:
        G, one flat gradient a row, shape (B, D).
    """
    if loss_reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction must be one of {REDUCTIONS}, got {loss_reduction!r}"
        )
    rows = sample_shares(model, lambda: loss_fn(model(x), y))
    return rows * len(rows) if loss_reduction == "mean" else rows


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
            capture.answer()
            G = rows.take(grads)
        finally:
            capture.unsubscribe(rows)
    if G is None:
        raise RuntimeError("the loss does not depend on any trainable parameter")
    return G
