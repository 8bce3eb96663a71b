from dataclasses import replace
from zlib import crc32

import numpy as np

from dome_lab.paper.figures import runs_so_far
from dome_lab.paper.run import Run

RUN = Run(task="mnist", model="resnet8", seed=0, batch_size=128, epochs=6, rank=100)
SCATTER = (-0.002, 0.0, 0.002)  # what sets three seeds apart


def training_rows(run, jitter=1e-5, **columns):
    """Rows of a run: a column is a number (its last value) or the whole curve."""
    curves = {
        "train_loss": np.linspace(2, 1, run.epochs),
        "fraction": np.linspace(0.9, 0.5, run.epochs),
        "test_accuracy": 0.5,
        "test_macro_f1": 0.5,
        "kept_norm": 0.3,
        "processor_seconds": 1.0,
    }
    # No two runs are alike, and seeds that agree to the last digit have no interval.
    rng = np.random.default_rng(crc32(str(run.columns()).encode()))
    full = {
        name: np.full(run.epochs, value) + jitter * rng.normal()
        for name, value in (curves | columns).items()
    }
    return [
        {**run.columns(), "epoch": epoch + 1}
        | {name: float(curve[epoch]) for name, curve in full.items()}
        for epoch in range(run.epochs)
    ]


def seeds(run, scatter=SCATTER, **columns):
    """Rows of three runs that differ by a little in their accuracy."""
    rows = []
    for seed, shift in enumerate(scatter):
        moved = dict(columns)
        for name in ("test_accuracy", "test_macro_f1"):
            moved[name] = np.asarray(columns.get(name, 0.5)) + shift
            if moved[name].ndim == 0:
                moved[name] = float(moved[name])
        rows += training_rows(replace(run, seed=seed), **moved)
    return rows


def two_arms(run, plain, filtered, scatter=SCATTER):
    """Both arms of three seeds; the scatter is the filtered arm's alone."""
    watching = replace(run, removes="nothing")
    nothing = [0.0] * len(scatter)
    return seeds(run, scatter, **filtered) + seeds(watching, nothing, **plain)


def staged_rows(figure, config, compute_run):
    """The rows of every run of a figure with stages, one run after the other."""
    found = {}
    while missing := [
        run for run in runs_so_far(figure, config, found.get) if run not in found
    ]:
        found[missing[0]] = list(compute_run(missing[0]))
    return [row for rows in found.values() for row in rows]
