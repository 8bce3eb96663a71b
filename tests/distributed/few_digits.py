"""A program that trains on digits, on few of them.

torchrun few_digits.py PROGRAM ...
"""

import runpy
import sys
from functools import partial
from importlib import import_module

from dome_lab.paper.tasks.selection import Selection

if __name__ == "__main__":
    task = import_module("dome_lab.paper.tasks.digits")
    few = Selection(num_train=256, num_test=100)
    task.digits = partial(task.digits, selection=few)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
