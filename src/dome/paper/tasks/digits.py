"""The 1,797 handwritten 8x8 digits that come with scikit-learn: no download."""

import torch
from sklearn.datasets import load_digits

from dome.paper.tasks.task import Task

TEST_SHARE = 0.25


def digits(seed: int = 0) -> Task:
    """Digits as images (N, 1, 8, 8), zero mean and unit variance over training pixels.

    Args:
        seed: Decides which quarter of the images is held out for testing.
    """
    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([num := int(TEST_SHARE * len(x)), len(x) - num])
    mean, scale = x[train].mean(), x[train].std()
    x = (x - mean) / scale
    return Task("digits", x[train], y[train], x[test], y[test], num_classes=10)
