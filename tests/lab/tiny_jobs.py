# In a file of their own, because the processes that do jobs import them by name.
import multiprocessing
import os
import time
from pathlib import Path

from dome_lab.paper.workers import Later


def process_id_and_wait(job):
    yield os.getpid()
    while True:
        time.sleep(0.1)


def refuse(job):
    yield from ()
    raise ValueError(f"nothing is left of {job}")


def wait_a_moment(job):
    time.sleep(0.5 if job.startswith("long") else 0)
    yield job


def second_time(job):
    if job.endswith("late") and not Path(job).exists():
        Path(job).touch()
        raise Later("not yet")
    yield job


def hold_a_lock(job):
    globals()["lock"] = multiprocessing.RLock()  # as tqdm does, for good
    yield os.getpid()
