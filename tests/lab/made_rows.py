"""Rows with numbers that are known beforehand."""

import json
from dataclasses import replace

from dome_lab.paper.rows import append_run
from dome_lab.paper.run import Run

PLAIN = Run(task="digits", model="resnet8", seed=0, batch_size=16, epochs=4, lr=0.1)
FILTERED = replace(PLAIN, rank=4)
SHIFTS = (-0.01, 0.0, 0.01)  # what sets three seeds apart


def run_rows(run, accuracy, loss=1.0, **columns):
    """Rows of a run that ends at this accuracy and loss."""
    tracked = {
        "fraction": 0.8,
        "kept_norm": 0.4,
        "drift": 10.0,
        "eigenvalues": [8.0, 4.0, 2.0, 1.0],
    }
    nothing = dict.fromkeys(tracked) | {"kept_norm": 1.0}
    common = {
        "test_accuracy": accuracy,
        "train_loss": loss,
        "test_loss": loss,
        "test_macro_f1": accuracy,
        "seconds": 1.0,
    }
    common |= (nothing if run.rank is None else tracked) | columns
    return [
        run.columns() | common | {"epoch": epoch} for epoch in range(1, run.epochs + 1)
    ]


def write_arms(path, plain=0.5, filtered=0.7, run=FILTERED, shifts=SHIFTS, **columns):
    """Both arms of a few seeds; the filtered one scatters."""
    for seed, shift in enumerate(shifts):
        without = replace(run, seed=seed, rank=None)
        append_run(path, run_rows(without, plain))
        with_ = replace(run, seed=seed)
        append_run(path, run_rows(with_, filtered + shift, 0.5 + shift, **columns))
    return path


def write_loose(path, rows):
    """Rows of a loop of one's own."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
