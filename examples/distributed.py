"""Digits on several workers: what each way to train sends, and what the model learns.

    torchrun --standalone --nproc-per-node=2 examples/distributed.py

Called without torchrun, it starts itself with two workers.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
from dome.compression import HadamardSketch, TopK
from dome_lab.paper.models import resnet8
from dome_lab.paper.tasks.images import digits

RANK, BATCH = 32, 32  # directions removed; samples a step, of all workers together
RATE = 1000

WAYS = {
    "worker": {"samples": "worker"},
    "per_sample": {"samples": "per_sample"},
    "sketch": {"compressor": lambda: HadamardSketch(RATE)},
    "sketch, shared": {"compressor": lambda: HadamardSketch(RATE), "share": 50},
    "top-k": {"compressor": lambda: TopK(RATE)},
}


def train(way, epochs):
    """Accuracy; of a step: bytes, DDP's bytes, seconds and seconds of computing."""
    task = digits()
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet8(in_channels=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = dict(WAYS.get(way, {}))
    if "compressor" in options:
        options["compressor"] = options["compressor"]()
    grad_filter = None
    if way != "DDP":
        grad_filter = dome.distributed.attach(model, optimizer, RANK, **options)
    order, seconds = torch.Generator().manual_seed(0), []
    computing = time.process_time()
    for _ in range(epochs):
        for batch in torch.randperm(len(task.train_x), generator=order).split(BATCH):
            if len(batch) < BATCH:
                continue
            own = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
            begin = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(task.train_x[own]), task.train_y[own]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
    computing = (time.process_time() - computing) / len(seconds)
    with torch.no_grad():
        answers = model.module(task.test_x).argmax(dim=1)
    accuracy = (answers == task.test_y).double().mean().item()
    num_workers = dist.get_world_size()
    ddp = (
        2 * (num_workers - 1) / num_workers * sum(p.nbytes for p in model.parameters())
    )
    sent = ddp
    if grad_filter is not None:
        sent = grad_filter.stats.total_bytes_sent / len(seconds)
    return accuracy, sent, ddp, statistics.median(seconds), computing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", default=["DDP", *WAYS])
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} workers, {BATCH} samples a step, rank {RANK}")
        heads = f"{'way':<16}{'bytes a step':>14}{'of DDP':>10}{'ms':>7}"
        print(heads + f"{'ms of CPU':>11}{'accuracy':>10}")
    for way in options.ways:
        accuracy, sent, ddp, seconds, computing = train(way, options.epochs)
        if dist.get_rank() == 0:
            share = f"{sent / ddp:.4f}" if ddp else "-"
            print(
                f"{way:<16}{sent:>14,.0f}{share:>10}{1e3 * seconds:>7.0f}"
                f"{1e3 * computing:>11.0f}{accuracy:>10.3f}",
                flush=True,
            )
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node=2", __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
