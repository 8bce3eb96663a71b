"""Jobs in parallel processes, one thread each.

For small networks two processes of one thread get through more runs than one process
of two, and a run gives the same numbers however many cores there are.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

# Options of mallopt(3), and what they are set to: how much of what is freed is kept,
# and the largest block that is.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, LARGEST_KEPT = 1 << 27, 1 << 25
# Where a user has told glibc what to keep.
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_what_steps_free() -> bool:
    """Let glibc keep up to 128 MiB of what is freed, for this process.

    By itself it gives nearly all of it back to the system, and the next step has it
    handed out again, page by page, each zeroed: a fifth of a step of ResNet-8, with
    the filter or without. A glibc that was told by its environment what to keep is
    left alone, and other allocators do not mind.

    Returns:
        Whether it listens.
    """
    if sys.platform != "linux" or any(name in os.environ for name in TOLD):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, KEPT)
    return all(bool(mallopt(*option)) for option in options)


Job = TypeVar("Job", bound=Hashable)
Result = TypeVar("Result")

# Errors whose message is meant for users, and needs no name of a class before it.
_PLAIN_ERRORS = (OSError, RuntimeError, ValueError)


class WorkerError(RuntimeError):
    """A job failed in its process; the traceback there is in the notes."""


class Later(Exception):  # noqa: N818 - not an error
    """Raised by a job that cannot be done now: it is put back behind the others."""


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    details: str


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(
    compute: Callable[[Job], Iterable[Result]],
    jobs: Sequence[Job],
    num_workers: int,
    fits: Callable[[Job, Collection[Job]], bool] = lambda *_: True,
    more: Callable[[], Sequence[Job]] | None = None,
) -> Iterator[tuple[Job, Result | Later | None]]:
    """Yield every job's results as they come, and (job, None) when the job is over.

    A job that raises ``Later`` yields that, and is started again behind those waiting.

    Args:
        compute: A module's own function, as it is looked up by name in the process.
        jobs: Started in this order; put the long ones first.
        num_workers: Number of processes.
        fits: Whether a job may start beside those under way; one that does not is
            passed over for now. Without others under way every job fits.
        more: Jobs that have come up since it was last asked, which is whenever one is
            over; they are started before those that wait.
    """
    waiting = list(jobs)
    most = num_workers if more is not None else len(jobs)
    with _workers(compute, min(num_workers, most)) as idle:
        busy: dict[Any, Job] = {}
        while waiting or busy:
            while idle and (job := _next(waiting, busy.values(), fits)) is not None:
                waiting.remove(job)
                connection = idle.pop()
                busy[connection] = job
                _send(connection, job)
            for ready in wait(list(busy)):
                result = _receive(ready, busy[ready])
                yield busy[ready], result
                if isinstance(result, Later):
                    waiting.append(busy.pop(ready))
                    idle.append(ready)
                elif result is None:
                    del busy[ready]
                    idle.append(ready)
                    if more is not None:
                        waiting[:0] = more()


def _next(
    waiting: Sequence[Job],
    busy: Collection[Job],
    fits: Callable[[Job, Collection[Job]], bool],
) -> Job | None:
    return next((job for job in waiting if not busy or fits(job, busy)), None)


def _send(connection: Any, job: object) -> None:  # noqa: ANN401 - see _receive
    try:
        connection.send(job)
    except (BrokenPipeError, ConnectionResetError):
        raise _ended(job) from None


def _receive(connection: Any, job: object) -> Any:  # noqa: ANN401 - any job's result
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        raise _ended(job) from None
    if isinstance(message, _Failure):
        error = WorkerError(f"{job}: {message.message}")
        error.add_note(message.details)
        raise error
    return message


def _ended(job: object) -> WorkerError:
    return WorkerError(f"the process of {job} ended unexpectedly")


@contextmanager
def _workers(
    compute: Callable[[Any], Iterable[Any]], num_workers: int
) -> Iterator[list[Any]]:
    """Connections to as many new processes, which end with the block."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        with _interrupts_held_back():
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(compute, theirs), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
        yield connections
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: this process ends them itself.

    They inherit that the signal is blocked; here it arrives when the block is left.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its start would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread, such as a progress bar's, may take the signal: Python would raise
    # here all the same, between the start of a process and what it is to be told.
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if is_main and handler is not None:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _work(compute: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    """Body of a process: takes jobs, sends results, ends with the other side."""
    torch.set_num_threads(1)
    keep_what_steps_free()
    # Locks that libraries make here, such as tqdm's, then have no name that is told as
    # leaked when this process is terminated.
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while True:
            _work_once(compute, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent() -> None:
    """Wait for the other side to be gone, killed or not, and stop in mid-job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work_once(compute: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    job = connection.recv()
    try:
        for result in compute(job):
            connection.send(result)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Later as later:
        connection.send(later)
    except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
        kind = "" if isinstance(error, _PLAIN_ERRORS) else f"{type(error).__name__}: "
        message = f"{kind}{error}"
        connection.send(_Failure(message, traceback.format_exc()))
    else:
        connection.send(None)
