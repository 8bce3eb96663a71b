"""Runs computed in parallel processes and stored as they end.

A run is stored in one piece when it is over, so whatever stops this loses the runs
under way and nothing else.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dome_lab.paper.rows import Key, Row, append_run
from dome_lab.paper.run import Run
from dome_lab.paper.workers import run_all


@dataclass(frozen=True, slots=True)
class Job:
    """A run to compute, for the figure that asked first.

    Attributes:
        figure: Name of the figure.
        run: The run.
        compute: What computes it: a module's own function, whose module's name keeps
            apart rows of different kinds.
    """

    figure: str
    run: Run
    compute: Callable[[Run], Iterator[Row]]

    @property
    def key(self) -> Key:
        """What its rows are found by."""
        return self.compute.__module__.rpartition(".")[2], self.run

    def __str__(self) -> str:
        return f"{self.figure.partition('_')[0]}: {self.run}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Attributes:
        job: The job.
        row: Its newest row; None when the job is over.
        seconds: How long the row took.
        stored: All its rows as they were stored, when the job is over.
    """

    job: Job
    row: Row | None = None
    seconds: float = 0.0
    stored: tuple[Row, ...] = ()


def compute_jobs(
    jobs: Sequence[Job],
    paths: Mapping[str, Path],
    num_workers: int,
    limits: Mapping[str, int] | None = None,
    more: Callable[[], Sequence[Job]] | None = None,
) -> Iterator[Event]:
    """Compute jobs, and store each when it is over.

    Args:
        jobs: Started in this order, each once.
        paths: The file of rows of each figure.
        num_workers: Number of processes.
        limits: How many jobs of a figure may run at a time, where it is limited.
        more: Jobs that the rows stored since it was last asked call for.
    """

    def fits(job: Job, busy: Collection[Job]) -> bool:
        beside = Counter(other.figure for other in busy)
        return beside[job.figure] < (limits or {}).get(job.figure, num_workers)

    pending: dict[Job, list[Row]] = {}
    for job, result in run_all(_timed_rows, jobs, num_workers, fits, more):
        if result is None:
            rows = append_run(paths[job.figure], pending.pop(job), job.key[0])
            yield Event(job, stored=tuple(rows))
        else:
            row, seconds = result
            row.setdefault("seconds", seconds)
            pending.setdefault(job, []).append(row)
            yield Event(job, row, seconds)


def _timed_rows(job: Job) -> Iterator[tuple[Row, float]]:
    is_empty, before = True, time.perf_counter()
    for row in job.compute(job.run):
        now = time.perf_counter()
        yield row, now - before
        is_empty, before = False, now
    if is_empty:
        raise RuntimeError("the run gave no rows")
