"""Runs computed in parallel processes and stored as they end.

A run is stored in one piece when it is over. Until then its state after every epoch
lies next to the rows, if what computes it can resume, so whatever stops this loses an
epoch at most. Several commands, on one machine or more, may work on one folder: each
run is locked while it is computed, and looked for among the rows before.
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dome_lab.paper.lock import PATIENCE, LockedError, locked
from dome_lab.paper.mending import mend
from dome_lab.paper.resuming import StateFile, digest_of
from dome_lab.paper.rows import Key, Row, append_run, find_run, seconds_of
from dome_lab.paper.run import Run
from dome_lab.paper.workers import Later, run_all

LATER = 2.0  # seconds until a run that is computed elsewhere is asked for again


@dataclass(frozen=True, slots=True)
class Job:
    """A run to compute, for the figure that asked first.

    Attributes:
        figure: Name of the figure.
        run: The run.
        compute: What computes it: a module's own function, whose module's name keeps
            apart rows of different kinds. One with a ``keeper`` resumes after its last
            whole epoch.
    """

    figure: str
    run: Run
    compute: Callable[..., Iterator[Row]]

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
        row: Its newest row; None when the job is over, or is not ours.
        seconds: How long the row took; of a job that was over before it came to us, how
            long all its rows took.
        stored: All its rows as they were stored, when the job is over.
        elsewhere: Who computes it, if somebody else does.
    """

    job: Job
    row: Row | None = None
    seconds: float = 0.0
    stored: tuple[Row, ...] = ()
    elsewhere: str = ""


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

    stored: dict[Job, tuple[Row, ...]] = {}
    is_ours: set[Job] = set()
    work = partial(_stored_rows, dict(paths))
    for job, result in run_all(work, jobs, num_workers, fits, more):
        if isinstance(result, Later):
            yield Event(job, elsewhere=str(result))
        elif result is None:
            rows = stored.pop(job)
            seconds = 0.0 if job in is_ours else seconds_of(rows)
            yield Event(job, seconds=seconds, stored=rows)
        elif isinstance(result, _Stored):
            stored[job] = result.rows
        else:
            is_ours.add(job)
            yield Event(job, *result)


@dataclass(frozen=True, slots=True)
class _Stored:
    rows: tuple[Row, ...]


def _stored_rows(
    paths: Mapping[str, Path], job: Job
) -> Iterator[tuple[Row, float] | _Stored]:
    """Compute a run where it was left off, if it is not stored; in the end store it."""
    path, name = paths[job.figure], digest_of(job.key)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path.parent, f".{name}.lock"))
        except LockedError as error:
            time.sleep(LATER)
            raise Later(str(error)) from None
        state = StateFile(path.with_name(f".{name}.state"))
        rows = _found(path, job)
        if rows is None:
            computed = yield from _timed_rows(job, state)
            with locked(path.parent, patience=PATIENCE):
                mend(path)  # another process may have been killed while it wrote
                # A machine that does not see our locks may have been quicker.
                rows = _found(path, job) or append_run(path, computed, job.key[0])
        state.remove()
        yield _Stored(tuple(rows))


def _found(path: Path, job: Job) -> list[Row] | None:
    return find_run(sorted(path.parent.glob("*.jsonl")), job.key)


def _timed_rows(
    job: Job, state: StateFile
) -> Generator[tuple[Row, float], None, list[Row]]:
    """Yield rows and the seconds each took; return all of them."""
    if state.note:
        raise RuntimeError(
            f"{state.path} {state.note}: go on with that code, or delete the file to "
            f"compute the run from its beginning"
        )
    rows = list(state.rows)
    for row in rows:
        yield row, seconds_of([row])
    can_resume = "keeper" in inspect.signature(job.compute).parameters
    options = {"keeper": state} if can_resume else {}
    before = time.perf_counter()
    for row in job.compute(job.run, **options):
        now = time.perf_counter()
        row.setdefault("seconds", now - before)
        rows.append(row)
        yield row, now - before
        before = now
    if not rows:
        raise RuntimeError("the run gave no rows")
    return rows
