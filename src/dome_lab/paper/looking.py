"""What a look into a run compares: its tracked basis, and an exact one beside it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import covariance_eigenpairs
from dome_lab.paper.outliers import CURVATURE_BATCH
from dome_lab.paper.training import Step

Samples = tuple[Tensor, Tensor]

TRACKED, COVARIANCE = "tracked", "covariance"


def both_bases(
    step: Step, model: nn.Module, samples: Samples, rank: int | None
) -> dict[str, Tensor | None]:
    """Both bases, (D, rank) each; None where the run has diverged."""
    if step.filter is None or rank is None:
        raise ValueError("a run without a tracker has no basis: set a rank")
    (tracker,) = step.filter.trackers.values()
    return {
        TRACKED: tracker.basis.clone(),
        COVARIANCE: _covariance(model, samples, rank),
    }


def _covariance(model: nn.Module, samples: Samples, rank: int) -> Tensor | None:
    """Leading eigenvectors of the covariance of samples' gradients, (D, rank)."""
    if not _is_finite(model):
        return None
    parts = (part.split(CURVATURE_BATCH) for part in samples)
    grads = [
        dome.per_sample_gradients(model, cross_entropy, x, y)
        for x, y in zip(*parts, strict=True)
    ]
    try:
        return covariance_eigenpairs(torch.cat(grads), rank)[1]
    except ValueError:  # so certain of everything that few gradients are left
        return None


def _is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def on_device_of(model: nn.Module, samples: Samples) -> Samples:
    """The same samples where the model is."""
    device = next(model.parameters()).device
    x, y = samples
    return x.to(device), y.to(device)
