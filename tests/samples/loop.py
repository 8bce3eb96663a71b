import torch
from torch import Tensor

from dome.parameters import Layout


def tensors_in(output):
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [t for value in values for t in tensors_in(value)]


def sum_loss(output):
    return sum(t.tanh().square().sum() for t in tensors_in(output))


def sample(inputs, index, batch_dim, batch):
    def one(t):
        if not isinstance(t, Tensor):
            return t
        dims = [
            d for d in (batch_dim, *range(t.ndim)) if d < t.ndim and t.shape[d] == batch
        ]
        return t.narrow(dims[0], index, 1) if dims else t

    return [one(t) for t in inputs]


def per_sample_loop(model, inputs, batch_dim=0, loss=sum_loss):
    layout = Layout(model)
    batch = inputs[0].shape[batch_dim]
    rows = []
    for index in range(batch):
        value = loss(model(*sample(inputs, index, batch_dim, batch)))
        grads = torch.autograd.grad(value, layout.parameters, allow_unused=True)
        pairs = zip(grads, layout.parameters, strict=True)
        rows.append(
            torch.cat(
                [(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]
            )
        )
    return torch.stack(rows)
