"""Gaussian noise and uniform numbers that nobody can predict.

By default both come from the operating system's cryptographic generator, whatever seeds
the program sets. A ``torch.Generator`` makes them reproducible, for experiments:
whoever knows its seed, or recovers its state from outputs, can subtract the noise.
"""

import hashlib
import math
import os

import torch
from torch import Tensor

BITS = 53  # of a float64's significand
TERMS = 4  # Gaussian draws in one number of secure noise


class Randomness:
    """Source of noise and of sampling decisions.

    Args:
        generator: None takes the operating system's generator; one of torch's makes
            numbers reproducible, and the guarantee void to whoever knows the seed.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def branch(self) -> "Randomness":
        """Another source, whose numbers do not depend on how many are drawn here."""
        if self._generator is None:
            return self
        own = self._generator
        seed = torch.randint(2**62, (1,), generator=own, device=own.device)
        return Randomness(torch.Generator().manual_seed(int(seed)))

    def go_on(self, num_steps: int) -> None:
        """Leave the numbers to others that this source would draw again.

        A run that is resumed with the seed it was started with would repeat its noise,
        and noise that is used twice can be subtracted.

        Args:
            num_steps: How many steps the run has taken.
        """
        if self._generator is not None:
            own = self._generator
            first = torch.randint(2**62, (1,), generator=own, device=own.device)
            mixed = hashlib.sha256(f"{int(first)} {num_steps}".encode()).digest()
            seed = int.from_bytes(mixed[:8]) >> 1
            self._generator = torch.Generator(own.device).manual_seed(seed)

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Independent normal numbers, float64, on the CPU (or the generator's device).

        A secure number is the sum of four draws over two. One alone takes few distinct
        values near a sum, which tells the sum (Mironov 2012; Holohan and Braghin 2021).
        """
        if self._generator is not None:
            return std * torch.randn(
                shape,
                generator=self._generator,
                device=self._generator.device,
                dtype=torch.float64,
            )
        count = math.prod(shape)
        total = torch.zeros(count, dtype=torch.float64)
        for _ in range(TERMS):
            total += _box_muller(count)
        return (std / math.sqrt(TERMS) * total).reshape(shape)

    def uniform(self, count: int) -> Tensor:
        """Independent uniform numbers in [0, 1), shape (count,), float64."""
        if self._generator is None:
            return _fractions(count)
        generator = self._generator
        numbers = torch.rand(
            count, generator=generator, device=generator.device, dtype=torch.float64
        )
        return numbers.cpu()


def _fractions(count: int) -> Tensor:
    """Multiples of 2⁻⁵³ in [0, 1), all equally likely, from the operating system."""
    if count == 0:
        return torch.zeros(0, dtype=torch.float64)
    words = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return (words & (2**BITS - 1)).double() * 2.0**-BITS


def _box_muller(count: int) -> Tensor:
    half = -(-count // 2)
    # 1 − u lies in (0, 1]: its logarithm is finite. The largest number is 8.6, which a
    # true normal number exceeds with probability 10⁻¹⁷.
    radius = (-2 * (1 - _fractions(half)).log()).sqrt()
    angle = 2 * math.pi * _fractions(half)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
