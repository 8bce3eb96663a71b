"""The gradient as compressors take it: a vector (D,) of finite floats."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)


def check_vector(vector: Tensor) -> None:
    """Refuse what is no vector (D,), and a vector with a value that is not finite."""
    check_shape(vector)
    if not all_finite(vector):
        wrong = (~vector.isfinite()).nonzero()
        index = int(wrong[0])
        raise ValueError(
            f"entry {index} of the gradient is {float(vector[index])} ({len(wrong)} of "
            f"{len(vector)} are not finite): skip this step, or find the layer that "
            f"made it"
        )


def check_shape(vector: Tensor) -> None:
    """Refuse what is not float32 or float64 of shape (D,) with D at least 1."""
    if vector.dim() != 1:
        raise ValueError(f"a gradient is a vector (D,), got {tuple(vector.shape)}")
    if len(vector) == 0:
        raise ValueError("a gradient has at least one entry, got an empty vector")
    if vector.dtype not in DTYPES:
        raise ValueError(f"a gradient is float32 or float64, got {vector.dtype}")


def all_finite(values: Tensor) -> bool:
    """Whether every value is."""
    # One value that is not finite shows in the sum, thirty times faster; so does an
    # overflow of finite ones, which has to be told apart.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
