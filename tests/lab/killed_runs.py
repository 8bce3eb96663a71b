# Run as a program: imports torch once, and forks the processes that it kills. Prints
# how many were killed, and how many went on in the middle of a run.
import json
import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from dome_lab.paper import jobs
from dome_lab.paper.jobs import Job, _stored_rows
from dome_lab.paper.rows import read_rows
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run, load_run_task

NUM_KILLS = 10
JOB = Job(
    "fig90",
    Run(
        task="digits",
        model="resnet8",
        seed=0,
        batch_size=16,
        epochs=30,
        optimizer="adam",
        lr=1e-3,
        num_train=48,
        num_test=20,
        rank=3,
        rate=10,
        update_every=2,
    ),
    compute_run,
)


def work(folder):
    for _ in _stored_rows({"fig90": folder / "fig90.jsonl"}, JOB):
        pass


def started(folder):
    child = os.fork()
    if child == 0:
        work(folder)
        os._exit(0)
    return child


def was_killed(folder, after):
    """Whether a process that worked there was killed; False: it came to its end."""
    child = started(folder)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed"
    return os.WIFSIGNALED(status)


def whole(folder):
    """The rows of a process that is left alone."""
    began = time.perf_counter()
    _, status = os.waitpid(started(folder), 0)
    assert status == 0, "it failed"
    rows = read_rows(folder / "fig90.jsonl")
    assert [path.name for path in folder.iterdir()] == ["fig90.jsonl"]
    kept = [{k: v for k, v in r.items() if "seconds" not in k} for r in rows]
    return kept, time.perf_counter() - began


def main(root):
    torch.set_num_threads(1)
    # Once, and not by every fork: git is asked, and what takes long to import is.
    jobs._code()
    import_module("torch._dynamo")
    load_run_task(JOB.run)
    moments = random.Random(35)
    undisturbed = root / "undisturbed"
    undisturbed.mkdir()
    expected, seconds = whole(undisturbed)
    num_kills = num_resumed = num_folders = 0
    while num_kills < NUM_KILLS:
        folder = root / str(num_folders)
        num_folders += 1
        folder.mkdir()
        # Ended by itself it is over: then the next folder.
        while num_kills < NUM_KILLS and was_killed(
            folder, moments.uniform(0, 0.4 * seconds)
        ):
            num_kills += 1
            num_resumed += bool(list(folder.glob(".*.state")))
        rows, _ = whole(folder)
        assert rows == expected
    counted = {"kills": num_kills, "resumed": num_resumed}
    sys.stdout.write(json.dumps(counted) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
