"""A program as torchrun starts it, but forked, and on few digits if it is on digits.

Started by forked.py, with RANK NUM_WORKERS PORT FOLDER PROGRAM ...: it runs in the
folder, and what it prints goes to said.0, ... there.
"""

import os
import runpy
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401 - as the line above: once, before the fork

from dome_lab.paper.tasks.selection import Selection


def prepare():
    run(sys.argv[5], "before the fork")  # for what it imports
    for name in ("dome.distributed", "dome_lab.paper.train"):
        import_module(name)
    task = import_module("dome_lab.paper.tasks.images")
    few = Selection(num_train=256, num_test=100)
    task.digits = partial(task.digits, selection=few)


def run(program, name):
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name=name)


def main():
    rank, size, port, folder, *command = sys.argv[1:]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.chdir(folder)
    sys.argv = command
    with Path(f"said.{rank}").open("w") as sys.stdout:
        run(command[0], "__main__")
    sys.stdout = sys.__stdout__
