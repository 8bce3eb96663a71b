"""A worker of three that ends inside a step, in one of several ways.

Started by forked.py, with RANK NUM_WORKERS FOLDER WAY WHO.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checks import Place, mine, rng, start, step
from models import batches

from dome.compression import TopK


def ends(way, place):
    """What the worker does in the middle of its third step."""
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raises":
        raise MemoryError("no room for a step")
    # hangs: until the others have given up
    others = [said_by(place, rank) for rank in range(place.size) if rank != place.rank]
    end = time.monotonic() + 200
    while not all(path.exists() for path in others) and time.monotonic() < end:
        time.sleep(0.1)


def said_by(place, rank):
    return place.shared / f"said.{rank}"


def main():
    rank, size, folder, way, who = sys.argv[1:]
    place = Place(int(rank), int(size), Path(folder))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=10 if way.startswith("hangs") else 20),
    )
    if way == "options":
        compared(place, who)
        return
    compressor = TopK(5) if way == "killed, compressed" else None
    model, optimizer, grad_filter = start(place, 4, compressor=compressor)
    workers, calls = grad_filter._world._workers, []
    original = workers.gather

    def gather(*arguments):
        calls.append(0)
        if len(calls) == 3 and place.rank == int(who):
            ends(way.partition(",")[0], place)
        return original(*arguments)

    workers.gather = gather
    began = time.monotonic()
    try:
        for number, (x, y) in enumerate(batches(rng(), 5)):
            began = time.monotonic()
            if way.endswith("barrier"):  # what the error tells users to call
                if number == 2 and place.rank == int(who):
                    ends(way.partition(",")[0], place)
                dist.monitored_barrier(timeout=timedelta(seconds=5))
            step(model, optimizer, mine(place, x), mine(place, y))
    except RuntimeError as error:
        words = f"{time.monotonic() - began:.1f} s: {error}"
        said_by(place, place.rank).write_text(words)
        raise


def compared(place, who):
    """Attach with one option that this worker alone has, one after the other."""
    odd = place.rank == int(who)
    said = []
    for name, value in {
        "rank": 5,
        "tracker": "svd",
        "oversample": 2,
        "warmup": 3,
        "update_every": 2,
        "forget": 0.1,
        "layout": "layerwise",
        "after": torch.tanh,
        "basis_dtype": torch.float32,
        "compressor": TopK(5),
    }.items():
        options = {"rank": 4} | ({name: value} if odd else {})
        try:
            start(place, **options)
            said.append(f"{name}: nothing was said")
        except ValueError as error:
            said.append(str(error))
    said_by(place, place.rank).write_text("\n".join(said))
    dist.barrier()


if __name__ == "__main__":
    main()
