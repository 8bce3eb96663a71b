"""The gradient as compressors take it: a vector (D,) of finite floats."""

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)


def check_shape(vector: Tensor) -> None:
    """Refuse what is not float32 or float64 of shape (D,) with D at least 1."""
    if vector.dim() != 1:
        raise ValueError(f"a gradient is a vector (D,), got {tuple(vector.shape)}")
    if len(vector) == 0:
        raise ValueError("a gradient has at least one entry, got an empty vector")
    if vector.dtype not in DTYPES:
        raise ValueError(f"a gradient is float32 or float64, got {vector.dtype}")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all floats in some tensors are finite: one bool on their device."""
    # What is not finite shows in the extremes, fifty times faster than by isfinite.
    extremes = [
        extreme.double()
        for values in tensors
        if values.is_floating_point() and values.numel()
        for extreme in torch.aminmax(values)
    ]
    return torch.stack(extremes).isfinite().all()


def check_finite(vector: Tensor, parts: Sequence[Tensor]) -> None:
    """Refuse a vector (D,), or what is made of it, that is not finite.

    Both at once and after all else, because on a device the answer has to be waited
    for, and this is the only one that compressing a vector takes.
    """
    if not bool(all_finite([vector, *parts])):
        refuse(vector, parts)


def refuse(vector: Tensor, parts: Sequence[Tensor]) -> NoReturn:
    """Say what is not finite: an entry of the vector (D,), or what would be sent."""
    wrong = (~vector.isfinite()).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"entry {index} of the gradient is {float(vector[index])} ({len(wrong)} of "
            f"{len(vector)} are not finite): skip this step, or find the layer that "
            f"made it"
        )
    dtype = next(part.dtype for part in parts if part.is_floating_point())
    raise ValueError(does_not_fit("sent", dtype))


def check_recovered(vector: Tensor) -> None:
    """Refuse what was recovered, shape (D,), where it is not finite."""
    low, high = torch.aminmax(vector)
    if not bool(low.isfinite() & high.isfinite()):
        raise ValueError(does_not_fit("recovered", vector.dtype))


def does_not_fit(what: str, dtype: torch.dtype) -> str:
    """What is wrong with numbers too large to be sent or recovered."""
    return (
        f"a number to be {what} does not fit {dtype}: scale the gradient, or use "
        f"float64 for it and for the values sent"
    )


def power_of_two(magnitudes: Tensor) -> Tensor:
    """2^e near each of the magnitudes, of their shape.

    A vector divided by that of its largest entry can be squared without overflow, and
    loses no digits.
    """
    _, e = torch.frexp(magnitudes)
    # Farther out 2^-e would overflow itself.
    most = -int(math.log2(torch.finfo(magnitudes.dtype).tiny)) - 1
    return torch.ldexp(torch.ones_like(magnitudes), e.clamp(-most, most))
