"""Which learning rates does the demo take? Trials on seeds and images it never judges.

Each arm at each compression rate gets the one that is best on validation images, chosen
as in figure ext04 (``tuning.py``): seed 100 at every learning rate, seed 101 at the
best two, further ones where the best lies at an end. Rows are stored run by run; a
second call computes what is missing, and prints what was chosen, which the demo takes.

    python benchmarks/demo_rates.py
"""

from dataclasses import replace
from pathlib import Path

import torch

from dome_lab.paper.demo import Config, runs
from dome_lab.paper.rows import TRAINING, append_run, mend, read_runs, record_session
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run
from dome_lab.paper.tuning import Grid, search

NUM_TRAIN = 1000  # of the 1,348: the rest is for validation
ROWS = Path("docs/results/trials/demo_rates.jsonl")


def cases() -> list[Run]:
    """Both arms at every rate of the demo, on fewer images, the quick ones first."""
    every = [replace(run, num_train=NUM_TRAIN) for run in reversed(runs(Config()))]
    return [run for run in every if run.seed == 0]


def best_rate(case: Run, grid: Grid) -> float:
    """The learning rate chosen for a case, after computing what its choice takes."""
    while True:
        stored = read_runs([ROWS])
        found = {run: rows for (kind, run), rows in stored.items() if kind == TRAINING}
        best = search(case, grid, found, case.epochs)
        if not isinstance(best, list):
            return best
        for run in best:
            if run not in found:
                append_run(ROWS, list(compute_run(run)))


def main() -> None:
    """Print the learning rate of each arm and compression rate."""
    torch.set_num_threads(1)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    mend(ROWS)
    record_session(ROWS, {"caption": (__doc__ or "").splitlines()[0]}, "cpu")
    for case in cases():
        rate = best_rate(case, Grid())
        print(f"{case.arm}, compression {case.rate}: {rate:g}", flush=True)


if __name__ == "__main__":
    main()
