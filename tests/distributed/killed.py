"""A worker that is killed at step 7 of its first life, and a run that survives it.

torchrun --nproc-per-node=2 --max-restarts=1 killed.py FOLDER
"""

import gc
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checks import Place, flat, mine, rng, start, step
from models import batches, small_classifier


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    train(Place(dist.get_rank(), dist.get_world_size(), folder), folder)
    # While anything holds the group, its threads may outlive Python and abort it: see
    # "When a worker fails" in docs/how-to/workers.md. It did once in some hundred runs.
    gc.collect()
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


def train(place, folder):
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model, optimizer, grad_filter = start(place, 6, model=small_classifier())
    begin = 0
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        grad_filter.load_state_dict(state["filter"])
        begin = int(state["filter"]["num_steps"])
    note(place, 0, f"started at {begin}")
    for i, (x, y) in enumerate(batches(rng(), 10)):
        if i < begin:
            continue
        if i == 7 and first_life and place.rank == 1:
            note(place, 1, "killed at 7")
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, mine(place, x), mine(place, y))
        if (i + 1) % 3 == 0:
            state = grad_filter.state_dict(only=0)
            if place.rank == 0:
                save(folder / "state.pt", model, optimizer, state)
    if place.rank == 0:
        torch.save(flat(model), folder / "end.pt")


def save(path, model, optimizer, state):
    """In one rename: a kill leaves the old file or the new one."""
    parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(parts | {"filter": state}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def note(place, rank, line):
    if place.rank == rank:
        with (place.shared / "notes").open("a") as notes:
            notes.write(line + "\n")


if __name__ == "__main__":
    main()
