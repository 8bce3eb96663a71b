"""One worker: runs every check of a module, and notes the results.

Started by forked.py, with RANK NUM_WORKERS FOLDER SHARED MODULE.
"""

import importlib
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checks import Place


def prepare():
    """What is imported once, before the workers are forked."""
    importlib.import_module(sys.argv[5])


def main():
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    folder, shared = Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".* times the bytes of DDP")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    results = {}
    for name, check in sys.modules[sys.argv[5]].CHECKS.items():
        try:
            check(Place(rank, size, shared))
            results[name] = "passed"
        except BaseException:  # noqa: BLE001 - told to the test that asks
            results[name] = traceback.format_exc()
        (folder / f"results.{rank}.json").write_text(json.dumps(results))
        if results[name] != "passed":
            # The others wait in vain: they end with an error of their own.
            sys.exit(1)
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
