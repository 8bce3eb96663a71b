"""P workers, forked from one process that has imported what they need.

python forked.py FOLDER SCRIPT NUM_WORKERS ...

Importing torch takes longer than most of what a worker does. The script's ``prepare``,
if it has one, runs before they are forked. Each calls its ``main`` with its rank and P
as first arguments; what it prints goes to FOLDER/output.0, ... and how all of them
ended to FOLDER/codes.json.
"""

import json
import os
import runpy
import sys
from pathlib import Path


def main():
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [script, "no rank yet", *sys.argv[3:]]
    script_names = runpy.run_path(script, run_name="forked")
    work = script_names["main"]
    script_names.get("prepare", bool)()
    children = {}
    for rank in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv[1] = str(rank)
            work()
            return
        children[child] = rank
    codes = [None] * len(children)
    for _ in children:
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
