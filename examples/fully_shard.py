"""Digits with a model that is split over workers (FSDP2), filtered, and a checkpoint.

    torchrun --standalone --nproc-per-node=2 examples/fully_shard.py

Called without torchrun, it starts itself with two workers. Start it again with another
number of workers and the same --folder: it goes on from the checkpoint.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import dome
from dome_lab.paper.models import resnet8
from dome_lab.paper.tasks.images import digits

RANK, BATCH = 16, 64  # directions removed; samples a step, of all workers together
PARTS = 4  # micro-batches of a worker: with the workers they are the samples of a step


def split_model():
    """A ResNet-8 whose blocks are gathered one by one, as they are needed."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = resnet8(in_channels=1)
    for block in model.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accuracy(model, task):
    with torch.no_grad():
        answers = model(task.test_x).argmax(dim=1)
    return (answers == task.test_y).double().mean().item()


def train_epoch(model, optimizer, task, order):
    size, rank = dist.get_world_size(), dist.get_rank()
    for batch in torch.randperm(len(task.train_x), generator=order).split(BATCH):
        if len(batch) < BATCH:
            continue
        optimizer.zero_grad()
        for part in batch.tensor_split(size)[rank].tensor_split(PARTS):
            loss = cross_entropy(model(task.train_x[part]), task.train_y[part])
            (loss / PARTS).backward()
        optimizer.step()


def train_plain(task, epochs):
    """The arm without a filter."""
    model = split_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        train_epoch(model, optimizer, task, order)
        right = accuracy(model, task)
        if dist.get_rank() == 0:
            print(f"no filter, epoch {epoch + 1}: accuracy {right:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of checkpoints: none without it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = options.folder
    task, model = digits(), split_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    saved = sorted(folder.glob("step-*")) if folder else []
    if not saved:
        train_plain(task, options.epochs)
    grad_filter = dome.distributed.attach(model, optimizer, RANK, samples="worker")
    if saved:
        load(saved[-1], model, optimizer, grad_filter)
    order = torch.Generator().manual_seed(grad_filter.stats.step)
    for _ in range(options.epochs):
        train_epoch(model, optimizer, task, order)
        stats, right = grad_filter.stats, accuracy(model, task)
        if rank == 0:
            print(
                f"{size} workers, step {stats.step}: accuracy {right:.3f}, "
                f"{stats.fraction:.2f} of the gradient removed, "
                f"{stats.bytes_sent:,} bytes sent, "
                f"{stats.share_of_ddp:.4f} of FSDP2",
                flush=True,
            )
    if folder:
        newest = folder / f"step-{grad_filter.stats.step:06}"
        save(newest, model, optimizer, grad_filter)
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


def save(folder, model, optimizer, grad_filter):
    """Every worker writes its part; nothing is gathered."""
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "filter": grad_filter,
    }
    dcp.save(state, checkpoint_id=folder)


def load(folder, model, optimizer, grad_filter):
    """The checkpoint of any number of workers, each its part."""
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "filter": grad_filter,  # gets its state in dcp.load
    }
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node=2", __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
