"""Clipping and noise: what a step releases, and with which sensitivity.

Shapes: G (B, D) samples, U (D, K) a basis that none of these samples has turned, C the
clipping norm. Sensitivity: how far a sum moves, in Euclidean (Frobenius) norm, when one
sample joins the batch or leaves it. docs/explanation/privacy.md has the derivations.

By default noise and sampling decisions come from the operating system's cryptographic
generator, whatever seeds the program sets. A ``torch.Generator`` makes them
reproducible, for experiments: whoever knows its seed, or recovers its state from
outputs, can subtract the noise.

``Clip`` and ``GaussianNoise`` are stages for ``after``, which bound and blur the batch
gradient. They are **not** differential privacy: the basis came from the same samples,
and a batch's norm says nothing about one sample's share.
"""

import hashlib
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from dome.privacy.accounting import check_positive

MOMENT_SENSITIVITY = math.sqrt(2)  # of ``second_moment_``, in units of C²
# Rounding of a norm and of a scaled row must not carry it beyond C.
SAFETY = 1e-6
ROWS_AT_ONCE = 4
ENTRIES_AT_ONCE = 1 << 18  # what a core's cache holds in float64
BITS = 53  # of a float64's significand
TERMS = 4  # Gaussian draws in one number of secure noise


def without_span_(grads: Tensor, basis: Tensor) -> None:
    """G ← G − G U Uᵀ, row by row: what is clipped is what is formed here.

    A norm from ‖g‖² − ‖Uᵀ g‖² would be cheaper, and wrong by rounding exactly where
    nearly all of a sample is removed, so that clipping would not bound it.
    """
    grads.addmm_(grads @ basis, basis.T, alpha=-1)


def clipping_factors_(grads: Tensor, max_norm: float) -> Tensor:
    """min(1, C / ‖g_i‖) for every row, (B,) in float64; rows not finite are zeroed.

    A sample that is not finite contributes nothing, as if its gradient were zero: one
    bad sample must not decide what is released.
    """
    norms = row_norms(grads)
    bad = norms.isfinite().logical_not()
    grads[bad] = 0.0
    limit = max_norm * (1 - SAFETY)
    return torch.where(bad, 0.0, (limit / norms).clamp(max=1.0))


def row_norms(grads: Tensor) -> Tensor:
    """‖g_i‖ of every row, shape (B,), in float64: a norm too small would clip less."""
    # Few rows at a time: torch makes a float64 copy of what it is given.
    parts = [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
        for part in grads.split(ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def clipped_sum_(grads: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i with g̃ clipped to C, shape (D,) in float64. Sensitivity C.

    A sum in float32 rounds anew with every sample more, and samples that are alike
    round alike: at n = 6,000 that moved it by 9e-4 C.
    """
    factors = clipping_factors_(grads, max_norm)
    return torch.cat([factors @ part for _, part in _in_float64(grads)])


def second_moment_(grads: Tensor, basis: Tensor, max_norm: float) -> Tensor:
    """Σ g̃_i [g̃_iᵀ U, C], shape (D, K + 1) in float64. Sensitivity √2 C².

    The last column is C times the clipped sum, which centring needs: centring the
    samples themselves would cost a sensitivity of 4 C².
    """
    factors = clipping_factors_(grads, max_norm)
    # Clipped first: a product with a sample that is nearly too large to store is
    # infinite, and no factor brings it back.
    coefficients = grads.new_zeros((len(grads), basis.shape[1]), dtype=torch.float64)
    for columns, part in _in_float64(grads):
        coefficients += (factors[:, None] * part) @ basis[columns].double()
    ones = torch.ones_like(factors)[:, None]
    right = factors[:, None] * torch.cat([coefficients, max_norm * ones], dim=1)
    return torch.cat([part.T @ right for _, part in _in_float64(grads)])


def _in_float64(grads: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the samples after the other, in float64."""
    step = max(1, ENTRIES_AT_ONCE // max(len(grads), 1))
    for start in range(0, grads.shape[1], step):
        columns = slice(start, start + step)
        yield columns, grads[:, columns].double()


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
            raise ValueError(f"std must be a number of at least 0, got {std}")
        self.std = std
        self._randomness = Randomness(generator)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient with noise, shape (D,)."""
        noise = self._randomness.gaussian(tuple(gradient.shape), self.std)
        return gradient + noise.to(gradient)

    def __repr__(self) -> str:
        return f"GaussianNoise({self.std:g})"
