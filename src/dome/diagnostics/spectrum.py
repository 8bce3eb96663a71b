"""Spectrum of the centred covariance of gradient samples, whole and on demand.

Letters: N samples, D parameters. The N − 1 eigenvalues of the D x D covariance that are
not zero are those of the N x N Gram matrix of centred samples, formed in float64.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dome.diagnostics.rank import (
    Eigengap,
    SuggestedRank,
    eigengap,
    entropy_rank,
    knee,
    rank_of,
    warn_of_suggest,
)
from dome.samples import per_sample_gradients
from dome.samples.batches import Batches, Data
from dome.torch_private import own_arithmetic

COLUMNS = 8192  # of the Gram matrix's sum, converted to float64 at once
FIRST = (1, 2, 5, 10, 20, 50, 100, 200)  # shares that are printed
MOST_SAMPLES = 5000  # whose N x N matrix takes 200 MB, beside their gradients


@dataclass(frozen=True, slots=True)
class Spectrum:
    """All eigenvalues of a sample covariance, and what they say.

    Gap, knee and suggested rank are read off the first half: the last eigenvalues of a
    sample covariance fall towards zero whatever the distribution is.

    Attributes:
        eigenvalues: Largest first, shape (min(N − 1, D),), float64.
        num_samples: N.
    """

    eigenvalues: Tensor = field(repr=False)
    num_samples: int

    def __str__(self) -> str:
        num = len(self.eigenvalues)
        head = (
            f"{num} eigenvalues from {self.num_samples} samples, trace "
            f"{self.total_variance:.4g}"
        )
        if not self.total_variance > 0:
            return f"{head}: the samples do not differ"
        first = [k for k in FIRST if k < num]
        shares = ", ".join(f"{k}: {self.share(k):.0%}" for k in first)
        lines = [
            head,
            f"share of the first {shares}",
            f"entropy rank {self.entropy_rank:.1f}, {self.num_outliers} outliers",
            f"rank {rank_of(self._first_half)}",
        ]
        return "\n".join(lines)

    @property
    def total_variance(self) -> float:
        """Trace of the covariance."""
        return float(self.eigenvalues.sum())

    @property
    def entropy_rank(self) -> float:
        """Over how many directions the variance is spread."""
        return entropy_rank(self.eigenvalues)

    @property
    def effective_rank(self) -> float:
        """The old name of ``entropy_rank``."""
        warnings.warn(
            "Spectrum.effective_rank is called entropy_rank now: .stats has another "
            "effective_rank, how many directions samples have determined",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.entropy_rank

    @property
    def eigengap(self) -> Eigengap:
        """The largest ratio of neighbours."""
        return eigengap(self._first_half)

    @property
    def num_outliers(self) -> int:
        """How many eigenvalues stand out before the knee; 0 without one."""
        return knee(self._first_half) or 0

    @property
    def outliers(self) -> Tensor:
        """Which eigenvalues stand out, shape of ``eigenvalues``, bool."""
        index = torch.arange(len(self.eigenvalues), device=self.eigenvalues.device)
        return index < self.num_outliers

    def share(self, num: int) -> float:
        """How much of the variance the first ``num`` directions hold."""
        return float(self.eigenvalues[:num].sum() / self.eigenvalues.sum())

    def suggested_rank(self, num_classes: int | None = None) -> SuggestedRank:
        """How many directions to remove. Deprecated: ``dome.suggest`` says it."""
        warn_of_suggest("suggested_rank")
        return rank_of(self._first_half, num_classes)

    @property
    def _first_half(self) -> Tensor:
        return self.eigenvalues[: max(2, (len(self.eigenvalues) + 1) // 2)]


@own_arithmetic
def covariance_eigenvalues(grads: Tensor) -> Tensor:
    """Eigenvalues of (1/N) Σ (g − ḡ)(g − ḡ)ᵀ that can be other than 0, largest first.

    Args:
        grads: One gradient a row, shape (N, D).

    Returns:
        Shape (min(N − 1, D),), float64, O(N² D) without a D x D matrix; NaN if the
        gradients are not finite.
    """
    num = min(len(grads) - 1, grads.shape[1])
    gram = _centered_gram(grads)
    if not gram.isfinite().all():
        return gram.new_full((num,), math.nan)
    return torch.linalg.eigvalsh(gram).flip(0)[:num].clamp(min=0)


@own_arithmetic
def covariance_eigenpairs(grads: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues of the same covariance, and their directions.

    Args:
        grads: One gradient a row, shape (N, D), finite.
        num: How many, at most min(N − 1, D).

    Returns:
        Eigenvalues (num,), float64, largest first, and orthonormal directions (D, num).
    """
    most = min(len(grads) - 1, grads.shape[1])
    if not 1 <= num <= most:
        raise ValueError(
            f"num must be between 1 and {most}, because {len(grads)} centred samples "
            f"determine no more, got {num}: take more samples"
        )
    values, vectors = torch.linalg.eigh(_centered_gram(grads))
    values, vectors = values.flip(0)[:num], vectors.flip(1)[:, :num]
    if not values[-1] > values[0] * torch.finfo(grads.dtype).eps:
        raise ValueError(
            f"the samples have fewer than {num} directions of variance: take more "
            f"samples, or a smaller num"
        )
    scale = (len(grads) * values).rsqrt()
    weights = (vectors - vectors.mean(dim=0)) * scale
    return values, grads.T @ weights.to(grads.dtype)


def batch_spectrum(grads: Tensor) -> Spectrum:
    """Spectrum of the centred covariance of a batch of samples, shape (N, D)."""
    if grads.dim() != 2 or len(grads) < 3:
        raise ValueError(
            "a spectrum needs at least three samples as rows (N, D), got shape "
            f"{tuple(grads.shape)}"
        )
    if not grads.isfinite().all():
        raise ValueError("a gradient sample is not finite: there is no spectrum")
    return Spectrum(covariance_eigenvalues(grads), len(grads))


def data_spectrum(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    data: Data,
    *,
    batch_size: int = 128,
) -> Spectrum:
    """Spectrum of the centred covariance over a data set, at the model's weights.

    Holds all N gradients, N D numbers. For more samples than that allows take a part of
    them, or the leading directions alone: ``dome.curvature.Covariance``.

    Args:
        model: The network; it must treat samples independently.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches of them.
        batch_size: Samples whose gradients are taken at once, of (x, y).
    """
    batches = Batches(data, batch_size)
    if batches.num_samples > MOST_SAMPLES:
        raise ValueError(
            f"{batches.num_samples} samples need a matrix with as many rows and "
            f"columns: use at most {MOST_SAMPLES} of them, or "
            "dome.curvature.Covariance for the leading directions alone"
        )
    rows = [per_sample_gradients(model, loss_fn, x, y) for x, y in batches]
    return batch_spectrum(torch.cat(rows))


def _centered_gram(grads: Tensor) -> Tensor:
    """H Hᵀ / N of centred samples (N, D), in float64."""
    N = len(grads)
    gram = torch.zeros(N, N, dtype=torch.float64, device=grads.device)
    for block in grads.split(COLUMNS, dim=1):
        H = block.double()
        H = H - H.mean(dim=0)  # not in place: in float64 this is the caller's own
        gram.addmm_(H, H.T)
    return gram / N
