"""Groups of workers, forked from one process that has imported what they need.

python forked.py FOLDER SCRIPT GROUPS

Importing torch takes longer than most of what a worker does. GROUPS are lists in JSON,
[NUM_WORKERS, ...]: one group after the other. The script's ``prepare``, if it has one,
runs before any is forked, with the words of the first group. Each worker calls its
``main`` with its rank and P as first arguments; what it prints goes to
FOLDER/GROUP/output.0, ... and how all of a group ended to FOLDER/GROUP/codes.json.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

gc.disable()  # until all is imported

import torch._dynamo  # noqa: E402, F401 - else every worker does, with its optimizer


def stay_on_one_core():
    """Workers wait for each other all the time: to wake another core takes longer.

    A quarter of the processors' time, in the tests of fully_shard. Groups that run at
    once, each for one of pytest's processes, share them evenly.
    """
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {cores[process % len(cores)]})


def main():
    stay_on_one_core()
    folder, script, groups = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    sys.argv = [script, "no rank yet", *groups[0]]
    script_names = runpy.run_path(script, run_name="forked")
    script_names.get("prepare", bool)()
    # What a search for garbage looks at is copied: workers look at nothing imported.
    gc.freeze()
    gc.enable()
    for number, words in enumerate(groups):
        sys.argv = [script, "no rank yet", *words]
        if run_group(folder / str(number), script_names["main"]):
            return


def run_group(folder, work):
    """Whether this is one of the workers, which has done its work."""
    folder.mkdir()
    children = {}
    for rank in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv[1] = str(rank)
            work()
            return True
        children[child] = rank
    codes = [None] * len(children)
    for _ in children:
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps(codes))
    return False


if __name__ == "__main__":
    main()
