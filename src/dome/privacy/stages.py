"""Clipping and noise for ``after``: stages that a filtered batch gradient goes through.

They bound and blur the batch gradient. They are **not** differential privacy: the basis
came from the same samples, and a batch's norm says nothing about one sample's share.
That is ``dome.privacy.attach``.
"""

import math

import torch
from torch import Tensor

from dome.privacy.randomness import Randomness


class Clip:
    """Scales a gradient down to at most this norm: g · min(1, max_norm / ‖g‖).

    Args:
        max_norm: The largest norm that goes on.
    """

    def __init__(self, max_norm: float) -> None:
        check_positive("max_norm", max_norm)
        self.max_norm = max_norm

    def __call__(self, gradient: Tensor) -> Tensor:
        """The clipped gradient, shape (D,)."""
        norm = torch.linalg.vector_norm(gradient)
        return gradient * (self.max_norm / norm).clamp(max=1.0)

    def __repr__(self) -> str:
        return f"Clip({self.max_norm:g})"


class GaussianNoise:
    """Adds independent normal noise to every entry.

    Args:
        std: Standard deviation of an entry's noise.
        generator: Makes the noise reproducible; without one it comes from the operating
            system's generator and is different in every run.
    """

    def __init__(self, std: float, *, generator: torch.Generator | None = None) -> None:
        if not 0 <= std < math.inf:
            raise ValueError(f"std must be a number from 0 on, got {std}")
        self.std = std
        self._randomness = Randomness(generator)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient with noise, shape (D,)."""
        noise = self._randomness.gaussian(tuple(gradient.shape), self.std)
        return gradient + noise.to(gradient)

    def __repr__(self) -> str:
        return f"GaussianNoise({self.std:g})"


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a positive number."""
    # Asked this way round, NaN is refused too.
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")
