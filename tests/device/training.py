"""The same few steps of training on any device."""

import dataclasses

import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def seeded_batches(num=4, dtype=torch.float32):
    return list(batches(torch.Generator().manual_seed(7), num, dtype=dtype))


def attached(place, dtype=torch.float32, rank=4, **options):
    """A model, its optimizer and its filter, which starts as one on the CPU does."""
    model = small_classifier(dtype).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    grad_filter = dome.attach(model, optimizer, rank, **options)
    if "generator" not in options:
        # Generators of other kinds of devices draw other numbers to start from.
        start = dome.GradientFilter(small_classifier(dtype), rank, **options)
        grad_filter.load_state_dict(start.state_dict())
    return model, optimizer, grad_filter


def train(model, optimizer, data, parts=1):
    """Steps of ``parts`` backward passes each."""
    place = next(model.parameters()).device
    for x, y in data:
        optimizer.zero_grad()
        pairs = zip(x.to(place).chunk(parts), y.to(place).chunk(parts), strict=True)
        for x_part, y_part in pairs:
            (cross_entropy(model(x_part), y_part) / parts).backward()
        optimizer.step()


def outcome(model, grad_filter):
    """Where training led, and what the filter says of the last step."""
    stats = dataclasses.asdict(grad_filter.stats)
    del stats["seconds"], stats["orthogonality_error"]  # a clock, and rounding itself
    return {"parameters": flat(model), **stats}
