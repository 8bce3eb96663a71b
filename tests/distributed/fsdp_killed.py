"""A worker that is killed in forward or in backward, and what the others say of it.

Started by forked.py, with RANK NUM_WORKERS FOLDER WHERE.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checks import Place
from fsdp_checks import data, mine, start
from torch.nn.functional import cross_entropy


def main():
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    folder, where = Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    place = Place(rank, size, folder)
    # In one group the model itself gathers its parameters before it runs.
    model, optimizer, _ = start(place, layers="one group" not in where)
    try:
        for i, (x, y) in enumerate(data(4)):
            if (rank, i) == (1, 2) and where.startswith("forward"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = cross_entropy(model(mine(place, x)), mine(place, y))
            if (rank, i, where) == (1, 2, "backward"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        (folder / f"said.{rank}").write_text(str(error))
    os._exit(0)  # a group without one of its workers cannot be left in order


if __name__ == "__main__":
    main()
