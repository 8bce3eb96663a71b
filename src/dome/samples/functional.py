"""Per-sample gradients as a function, through a capture of its own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.sources.capture import Capture, capture_paused
from dome.samples.store.rows import Rows
from dome.samples.tracing.refuse import check_capturable


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Tensor:
    """Gradient of the loss of each sample with respect to all trainable parameters.

        G[b] = ∇ loss(model(x[b]), y[b])

    Leaves ``.grad`` alone, and what filters of this model have captured. The model must
    treat samples independently: batch norm in training mode does not.

    Args:
        model: The network; the columns follow its ``parameters()``.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        x: Inputs, shape (B, ...).
        y: Targets, shape (B, ...).

    Returns:
        G, one flat gradient a row, shape (B, D).
    """
    layout = Layout(model)
    check_capturable(model)
    rows, capture = Rows(layout, functional=True), Capture(model)
    with capture_paused(model):
        capture.subscribe(rows)
        try:
            with torch.enable_grad():
                loss = loss_fn(model(x), y)
            grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
            G = rows.take(grads)
        finally:
            capture.unsubscribe(rows)
    if G is None:
        raise RuntimeError("the loss does not depend on any trainable parameter")
    return G * len(G)
