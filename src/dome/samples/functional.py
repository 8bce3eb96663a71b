"""Per-sample gradients as a function, through the same capture."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.sources.per_sample import PerSample


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Tensor:
    """Gradient of the loss of each sample with respect to all trainable parameters.

        G[b] = ∇ loss(model(x[b]), y[b])

    Leaves ``.grad`` alone. The model must treat samples independently: batch norm in
    training mode does not.

    Args:
        model: The network; the columns follow its ``parameters()``.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        x: Inputs, shape (B, ...).
        y: Targets, shape (B, ...).

    Returns:
        G, one flat gradient a row, shape (B, D).
    """
    layout = Layout(model)
    source = PerSample(model, layout)
    source.rows.functional = True
    try:
        with torch.enable_grad():
            loss = loss_fn(model(x), y)
        grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
        rows = source.rows.take(grads)
    finally:
        source.detach()
    if rows is None:
        raise RuntimeError("the loss does not depend on any trainable parameter")
    return rows * len(rows)
