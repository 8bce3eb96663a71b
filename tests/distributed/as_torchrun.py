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
    for name in ("dome.distributed", "dome_lab.paper.train"):
        import_module(name)
    task = import_module("dome_lab.paper.tasks.digits")
    few = Selection(num_train=256, num_test=100)
    task.digits = partial(task.digits, selection=few)


def main():
    rank, size, port, folder, *command = sys.argv[1:]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.chdir(folder)
    sys.argv = command
    with Path(f"said.{rank}").open("w") as sys.stdout:
        runpy.run_path(command[0], run_name="__main__")
    sys.stdout = sys.__stdout__
