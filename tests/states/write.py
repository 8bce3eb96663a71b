"""Writes the states beside this file; they were written by commit 5361a94.

    PYTHONPATH=CHECKOUT_OF_5361a94/src:tests python tests/states/write.py

Each file has a filter's state after 12 steps, the model at that point, the batches of
the next 8 steps, and what the model was after these.
"""

from pathlib import Path

import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome

OPTIONS = {
    "power": {"rank": 4},
    "power_oversampled": {"rank": 4, "oversample": 2},
    "svd": {"rank": 4, "tracker": "svd"},
    "layerwise": {"rank": 3, "layout": "layerwise"},
}


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def write(path, options):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, **options)
    rng = torch.Generator().manual_seed(1)
    train(model, optimizer, batches(rng, 12))
    saved = {
        "state": {n: t.clone() for n, t in grad_filter.state_dict().items()},
        "model": {n: t.clone() for n, t in model.state_dict().items()},
        "bases": {n: t.basis.clone() for n, t in grad_filter.trackers.items()},
        "batches": list(batches(rng, 8)),
    }
    train(model, optimizer, saved["batches"])
    torch.save(saved | {"end": model.state_dict()}, path)


if __name__ == "__main__":
    for name, options in OPTIONS.items():
        write(Path(__file__).with_name(f"{name}.pt"), options)
