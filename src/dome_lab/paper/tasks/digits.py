"""The 1,797 handwritten 8x8 digits that come with scikit-learn: no download."""

import torch
from torch.nn.functional import interpolate

from dome_lab.paper.tasks.images import image_task
from dome_lab.paper.tasks.selection import Selection
from dome_lab.paper.tasks.task import Task

TEST_SHARE = 0.25
ALL = Selection()


def digits(seed: int = 0, size: int = 16, selection: Selection = ALL) -> Task:
    """Digits as images (N, 1, size, size), training pixels of mean 0 and variance 1.

    Args:
        seed: Decides which quarter of the images is held out for testing.
        size: Side of the images; other than 8, they are resized bilinearly.
        selection: How much of them.
    """
    from sklearn.datasets import load_digits  # slow to import, and often not needed

    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    if size != x.shape[-1]:
        x = interpolate(x, size=(size, size), mode="bilinear")
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([num := int(TEST_SHARE * len(x)), len(x) - num])
    return image_task("digits", x[train], y[train], x[test], y[test], selection)
