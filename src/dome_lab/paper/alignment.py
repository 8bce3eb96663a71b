"""A run's tracked basis beside exact eigenspaces of the curvature at the same weights.

Letters: C classes, D parameters; a basis or eigenspace is (D, K).
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome.curvature import (
    Curvature,
    DegenerateMatrixError,
    GaussNewton,
    Hessian,
    top_eigenpairs,
)
from dome.diagnostics import covariance_eigenpairs
from dome.diagnostics.angles import subspace_overlap
from dome_lab.paper.controls import CURVATURE_BATCH, CURVATURE_SAMPLES, TOLERANCE
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import some_samples
from dome_lab.paper.train import Step, training

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


HESSIAN, GAUSS_NEWTON = "hessian", "gauss_newton"
MATRICES: dict[str, type[Hessian] | type[GaussNewton]] = {
    HESSIAN: Hessian,
    GAUSS_NEWTON: GaussNewton,
}


def compute_alignment(run: Run) -> Iterator[Row]:
    """Train, and after epochs 1, 2, 4, ... compare the basis with the curvature.

    Yields:
        A row for each matrix, number of its leading eigenvectors (C or C²) and basis:
        the tracked U, or as many leading eigenvectors of the gradient covariance of the
        very samples that the curvature is computed over.
    """
    model, task, steps = training(run)
    samples = on_device_of(model, some_samples(task, CURVATURE_SAMPLES))
    C, num_parameters = task.num_classes, sum(p.numel() for p in model.parameters())
    num_steps, started = len(task.train_x) // run.batch_size, time.perf_counter()
    for step in steps:
        if not _is_looked_at(step, num_steps):
            continue
        bases = both_bases(step, model, samples, run.rank)
        curvature = _curvature(model, samples, C * C)
        rows = [
            Row(
                epoch=step.epoch,
                step=step.number,
                matrix=matrix,
                subspace=name,
                num=num,
                overlap=_overlap(bases[name], curvature[matrix], num),
                chance=(run.rank or 0) / num_parameters,
                num_samples=len(samples[0]),
            )
            for matrix in MATRICES
            for num in (C, C * C)
            for name in (TRACKED, COVARIANCE)
        ]
        now = time.perf_counter()
        seconds, started = (now - started) / len(rows), now
        for row in rows:
            yield Row(**run.columns(), **row, seconds=seconds)


def _overlap(basis: Tensor | None, vectors: Tensor | None, num: int) -> float | None:
    if basis is None or vectors is None:
        return None
    return subspace_overlap(basis, vectors[:, :num])


def _is_looked_at(step: Step, num_steps: int) -> bool:
    """Whether a step is the last of epoch 1, 2, 4, 8, ..."""
    is_power = step.epoch & (step.epoch - 1) == 0
    return is_power and step.number == step.epoch * num_steps


def _curvature(
    model: nn.Module, samples: Samples, num: int
) -> dict[str, Tensor | None]:
    """Leading eigenvectors of both matrices, (D, num) each; None as above."""
    return {
        name: _leading(
            matrix(
                model,
                cross_entropy,
                samples,
                batch_size=CURVATURE_BATCH,
                keep_graphs=True,
            ),
            num,
        )
        for name, matrix in MATRICES.items()
    }


def _leading(matrix: Curvature, num: int) -> Tensor | None:
    try:
        return top_eigenpairs(matrix, num, tolerance=TOLERANCE).vectors
    except DegenerateMatrixError:
        return None
