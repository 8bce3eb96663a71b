import torch
from torch import nn


def small_classifier(dtype=torch.float64, seed=0):
    """Two layers, 8 inputs, 3 classes, with in-place activation; 195 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))
    return model.to(dtype)


def batches(rng, num, size=12, dtype=torch.float64):
    for _ in range(num):
        x = torch.randn(size, 8, generator=rng, dtype=dtype)
        yield x, torch.randint(3, (size,), generator=rng)
