"""The 1,797 handwritten 8x8 digits that come with scikit-learn: no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
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
    x, y = _images()
    if size != x.shape[-1]:
        x = interpolate(x, size=(size, size), mode="bilinear")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([num := int(TEST_SHARE * len(x)), len(x) - num])
    return image_task("digits", x[train], y[train], x[test], y[test], selection)


def _images() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8), and which digits they are.

    From the file that ``load_digits`` reads: importing scikit-learn for it takes longer
    than importing torch, in every process.
    """
    spec = find_spec("sklearn")
    folders = (spec.submodule_search_locations if spec else None) or []
    paths = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    if paths and paths[0].exists():
        table = np.loadtxt(paths[0], delimiter=",", dtype=np.float32)
        pixels, labels = table[:, :-1], table[:, -1]
    else:  # says that scikit-learn is missing, or knows where the file is now
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return x, torch.as_tensor(labels, dtype=torch.int64)
