"""Which strength of EWC's penalty? Trials on seeds that table 3 does not judge.

Explicit steps on a strong penalty diverge, and how strong is too strong depends on the
seed: one seed is not enough to choose by. Here every strength is tried on seeds 100 to
102, with and without the filter, at the table's scale cpu; the best mean of the final
accuracy is what the table uses. Rows are stored run by run; a second call computes what
is missing, and prints the table.

    python benchmarks/ewc_penalties.py
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from dome_lab.paper.continual import compute_continual
from dome_lab.paper.figures.tab03_continual import SCALES
from dome_lab.paper.rows import Row, append_run, mend, read_runs
from dome_lab.paper.run import Run

SEEDS = (100, 101, 102)
STRENGTHS = {"split": (30, 100, 300, 1000), "permuted": (1, 3, 10, 30, 100)}
ROWS = Path("docs/results/trials/ewc_penalties.jsonl")
KIND = "continual"


def trials() -> Iterator[Run]:
    """A run for every stream, strength, arm and seed."""
    config = SCALES["cpu"]
    for stream, strengths in STRENGTHS.items():
        ranks = (None, config.run.rank)
        for strength, rank, seed in product(strengths, ranks, SEEDS):
            yield replace(
                config.run,
                stream=stream,
                epochs=config.epochs[stream],
                penalty=strength,
                rank=rank,
                seed=seed,
            )


def computed(run: Run) -> list[Row]:
    """The rows of a run, on one thread."""
    torch.set_num_threads(1)
    return list(compute_continual(run))


def main() -> None:
    """Compute what is missing, then print final accuracies by strength."""
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    mend(ROWS)
    found = read_runs([ROWS])
    missing = [run for run in trials() if (KIND, run) not in found]
    with get_context("spawn").Pool(2) as pool:
        for rows in pool.imap(computed, missing):
            append_run(ROWS, rows, KIND)
            print(f"{rows[-1]['stream']}, {rows[-1]['penalty']}: done", flush=True)
    found = read_runs([ROWS])
    groups: dict[tuple[object, ...], list[float]] = {}
    for run in trials():
        arm = "plain" if run.rank is None else "filtered"
        last = found[KIND, run][-1]["test_accuracy"]
        groups.setdefault((run.stream, arm, run.penalty), []).append(float(last))
    for (stream, arm, strength), accuracies in sorted(groups.items(), key=str):
        each = "  ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        mean = statistics.mean(accuracies)
        print(f"{stream:9} {arm:9} {strength:6} mean {mean:.3f}   {each}")


if __name__ == "__main__":
    main()
