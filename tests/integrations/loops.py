"""Plain training loops that trainers must agree with, and the filter line by line."""

import torch
from models import small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.reference import Dome


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def digits_like(num, dtype=torch.float64):
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(num, 8, generator=rng, dtype=dtype)
    return x, torch.randint(3, (num,), generator=rng)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def plain(batches, rank=4, accumulate=1, clip=None, make=sgd, model=None, **options):
    """The loop of the README: the trained parameters (D,) and the filter."""
    model = model or small_classifier()
    optimizer = make(model)
    grad_filter = dome.attach(model, optimizer, rank, **options)
    for i, (x, y) in enumerate(batches):
        (cross_entropy(model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    grad_filter.detach()
    return flat(model), grad_filter


def literal(batches, rank=4, accumulate=1, learning_rate=0.3):
    """Algorithm 1 with one backward a sample and SGD: the trained parameters (D,)."""
    model = small_classifier()
    sizes = [p.numel() for p in model.parameters()]
    start = dome.StreamingPower(sum(sizes), rank, dtype=torch.float64).basis.clone()
    twin = Dome(model, start)
    for i in range(0, len(batches), accumulate):
        x, y = map(torch.cat, zip(*batches[i : i + accumulate], strict=True))
        pieces = twin.filtered(cross_entropy, x, y).split(sizes)
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces, strict=True):
                p.sub_(learning_rate * piece.view(p.shape))
    return flat(model)
