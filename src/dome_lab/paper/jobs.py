"""Runs computed in parallel processes and stored as they end.

A run is stored in one piece when it is over. Until then its state after every epoch
lies next to the rows, if what computes it can resume, so whatever stops this loses an
epoch at most. Only the code that wrote a state, by commit and versions, may read it.
The rows are then, bit for bit, those of a run that was not stopped. Several commands,
on one machine or more, may work on one folder: each run is locked while it is computed,
and looked for among the rows before.
"""

import hashlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dome.files import temporary_of, whole_file
from dome_lab.paper.lock import PATIENCE, LockedError, locked
from dome_lab.paper.rows import Key, Row, append_run, commit, find_run, mend, seconds_of
from dome_lab.paper.run import Run
from dome_lab.paper.train import Training
from dome_lab.paper.workers import Later, run_all

NAME_LENGTH = 12


class StateFile:
    """The state of one run on disk.

    Attributes:
        path: The file.
        rows: Of the epochs that the state is behind.
        note: Why the file cannot be used; empty if it can, or if there is none.

    Args:
        path: The file, of this run only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.note = ""
        self._state: dict[str, Any] | None = None
        self._made_with = _made_with()
        self._read()

    def restore(self, training: Training) -> None:
        """Put a training behind the last epoch that was kept, if there is one."""
        if self._state is not None:
            training.load_state_dict(self._state)
            self._state = None

    def keep(self, training: Training, row: Row | None = None) -> None:
        """Write the state after an epoch, whole or not at all."""
        self.rows += [] if row is None else [row]
        state = {
            "made_with": self._made_with,
            "rows": json.dumps(self.rows),
            "training": training.state_dict(),
        }
        with whole_file(self.path) as file:
            torch.save(state, file)  # type: ignore[arg-type] # write() is enough

    def remove(self) -> None:
        """The run is stored: its state is not needed any more."""
        self.path.unlink(missing_ok=True)
        temporary_of(self.path).unlink(missing_ok=True)  # of a process killed then

    def _read(self) -> None:
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            rows, made_with = json.loads(state["rows"]), state["made_with"]
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of it
            self.note = f"cannot be read ({type(error).__name__})"
            return
        if made_with != self._made_with:
            self.note = f"was made with {made_with}, not {self._made_with}"
            return
        self.rows, self._state = rows, state["training"]


def digest_of(key: Key) -> str:
    """A short name of a run and of what computes it."""
    made_by, run = key
    told = json.dumps([made_by, run.columns()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:NAME_LENGTH]


def _made_with() -> str:
    """What the last digits depend on."""
    return f"{_code()}, {torch.get_num_threads()} threads"


@cache
def _code() -> str:
    versions = f"dome {version('dome-torch')}, torch {version('torch')}"
    return f"commit {commit()}, {versions}"


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
