"""Signal against noise of a batch gradient.

Letters: samples g_b (D,), b = 1..B, independent, of mean μ and covariance Σ; their
mean ḡ is the batch gradient, of covariance Σ/B.

    signal ‖μ‖²,  noise tr Σ / B

‖ḡ‖² itself overestimates ‖μ‖² by the noise, so that a gradient of pure noise would
seem to have a ratio of 1.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.torch_private import own_arithmetic
from dome.trackers.linalg import product, squared_norms


@dataclass(frozen=True, slots=True)
class SignalToNoise:
    """Unbiased estimates of signal and noise.

    To average over steps, average both and divide afterwards.

    Attributes:
        signal: Of ‖μ‖², the squared norm of the mean; negative where noise hides it.
        noise: Of tr Σ / B, the mean squared error of the batch gradient.
    """

    signal: float
    noise: float

    @property
    def ratio(self) -> float:
        """Signal over noise; NaN where there is neither.

        A ratio of two unbiased estimates, off by a relative 2/((B − 1) r) for normal
        samples, where r = (tr Σ)²/tr Σ² says over how many directions the noise is
        spread.
        """
        if self.noise == 0:
            return math.inf if self.signal > 0 else math.nan
        return self.signal / self.noise


@own_arithmetic
def signal_to_noise(grads: Tensor, basis: Tensor | None = None) -> SignalToNoise:
    """Signal and noise of the mean of gradient samples.

        noise = Σ_b ‖g_b − ḡ‖² / (B (B − 1)),  signal = ‖ḡ‖² − noise

    Args:
        grads: Samples, shape (B, D), at least two.
        basis: Take what is left outside these directions, shape (D, K). They must not
            come from the same samples, or the noise is underestimated.
    """
    if grads.dim() != 2 or len(grads) < 2:
        raise ValueError(
            "signal and noise need at least two samples as rows (B, D), got shape "
            f"{tuple(grads.shape)}"
        )
    mean = grads.mean(dim=0, keepdim=True)
    deviation = grads - mean
    squares = torch.stack([_squares(deviation), _squares(mean)])
    if basis is not None:
        inside = [product(rows, basis).square().sum() for rows in (deviation, mean)]
        squares = squares - torch.stack(inside)
    spread, length = squares.tolist()
    return from_squares(spread, length, len(grads))


@own_arithmetic
def captured_fraction(basis: Tensor, samples: Tensor) -> Tensor:
    """How much of a sample's length lies in a basis: the paper's fraction, a scalar.

        mean over b of ‖U Uᵀ g_b‖ / ‖g_b‖

    Args:
        basis: U, orthonormal columns, shape (D, K).
        samples: G, one gradient a row, shape (B, D). One that is zero counts as 0.
    """
    if samples.dim() == 1 and basis.shape == samples.shape:
        warnings.warn(
            "captured_fraction takes (basis, samples) now: of squared norms, take "
            "(captured / total).sqrt().mean()",
            DeprecationWarning,
            stacklevel=2,
        )
        return fraction_of(basis, samples)
    if basis.dim() != 2 or samples.dim() != 2 or samples.shape[1] != len(basis):
        raise ValueError(
            f"captured_fraction takes a basis (D, K) and samples as rows (B, D), got "
            f"shapes {tuple(basis.shape)} and {tuple(samples.shape)}"
        )
    captured = squared_norms(product(samples, basis))
    return fraction_of(captured, squared_norms(samples))


def fraction_of(captured: Tensor, total: Tensor) -> Tensor:
    """Mean of ‖U Uᵀ g_b‖ / ‖g_b‖ from the squared norms, each of shape (B,).

    A sample that is zero has nothing to capture and counts as 0; one whose norm is not
    known makes it NaN.
    """
    ratio = torch.where(total == 0, torch.zeros_like(total), captured / total)
    return ratio.clamp(0.0, 1.0).sqrt().mean()


def from_squares(spread: float, length: float, num_samples: int) -> SignalToNoise:
    """The same from Σ_b ‖g_b − ḡ‖², ‖ḡ‖² and B."""
    B = num_samples
    noise = max(spread, 0.0) / (B * (B - 1))
    return SignalToNoise(signal=length - noise, noise=noise)


def _squares(rows: Tensor) -> Tensor:
    return squared_norms(rows).sum()
