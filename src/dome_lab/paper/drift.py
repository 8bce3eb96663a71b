"""A run's tracked basis beside what it was some steps ago.

Letters: D parameters; a basis is (D, K).
"""

import time
from collections.abc import Iterator

from torch import Tensor

from dome.diagnostics import rms_sine
from dome.numerics.angles import principal_angles
from dome_lab.paper.looking import both_bases, on_device_of
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import some_samples
from dome_lab.paper.train import training
from dome_lab.paper.training import Step

DRIFT_SAMPLES = 300  # whose covariance is followed beside the tracked basis
ANCHORS = (20, 200)  # steps at which the waiting begins
LAGS = (1, 3, 10, 30, 100, 200)  # steps that are waited


def compute_drift(run: Run) -> Iterator[Row]:
    """Train, and compare the basis with what it was some steps ago.

    Yields:
        A row for each time at which the waiting begins (or the last such step there
        is), number of steps waited, and basis: the tracked U, or as many leading
        eigenvectors of the gradient covariance of the same few samples.
    """
    model, task, steps = training(run)
    samples = on_device_of(model, some_samples(task, DRIFT_SAMPLES))
    seen: dict[int, dict[str, Tensor | None]] = {}
    wanted = {a + lag for a in ANCHORS for lag in (0, *LAGS)}
    started = time.perf_counter()
    for step in steps:
        if step.number not in wanted:
            continue
        now = both_bases(step, model, samples, run.rank)
        rows = [
            _drift_row(step, anchor, name, before[name], basis)
            for anchor, before in seen.items()
            if step.number - anchor in LAGS
            for name, basis in now.items()
        ]
        if step.number in ANCHORS:
            seen[step.number] = now
        if not rows:
            continue
        end = time.perf_counter()
        seconds, started = (end - started) / len(rows), end
        for row in rows:
            yield Row(**run.columns(), **row, seconds=seconds)


def _drift_row(
    step: Step, anchor: int, name: str, before: Tensor | None, now: Tensor | None
) -> Row:
    where = Row(
        epoch=step.epoch,
        step=step.number,
        anchor=anchor,
        lag=step.number - anchor,
        subspace=name,
        num_samples=DRIFT_SAMPLES,
    )
    if before is None or now is None:
        return where | Row(overlap=None, rms_sine=None, largest_angle=None)
    angles = principal_angles(before, now)
    return where | Row(
        overlap=float(angles.cos().square().mean()),
        rms_sine=rms_sine(angles),
        largest_angle=float(angles[-1]),
    )
