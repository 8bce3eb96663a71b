import torch
from models import small_classifier
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dome.privacy

CLIP = 0.5


def samples(number, dtype=torch.float64, seed=3):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 8, generator=rng, dtype=dtype)
    return x, torch.randint(3, (number,), generator=rng)


def public_batches(dtype=torch.float64):
    return [samples(10, dtype, seed=99), samples(12, dtype, seed=98)]


def attach(model, optimizer, basis="released", rank=2, **options):
    """``dome.privacy.attach`` with settings for tests: seeded, every sample drawn."""
    chosen = {
        "max_grad_norm": CLIP,
        "noise_multiplier": 1.0,
        "sample_rate": 1.0,
        "generator": torch.Generator().manual_seed(5),
    }
    if basis == "public":
        dtype = next(model.parameters()).dtype
        chosen |= {"public": public_batches(dtype), "loss_fn": cross_entropy}
    if "target_epsilon" in options:
        del chosen["noise_multiplier"]
    return dome.privacy.attach(model, optimizer, rank, basis=basis, **chosen | options)


def attached(basis="released", *, lr=0.1, **options):
    """A small classifier, its optimizer, and the private filter between them."""
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, attach(model, optimizer, basis, **options)


def linear(dim, dtype=torch.float64):
    """A model for ``mean_output``: the gradient of a sample is the sample itself."""
    model = nn.Linear(dim, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    return model


def mean_output(outputs, _=None):
    return outputs.mean()


def train(model, optimizer, private, dataset, epochs=1, loss_fn=cross_entropy):
    if isinstance(dataset, tuple):
        dataset = TensorDataset(*dataset)
    loader = private.loader(dataset)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()


def flat_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])
