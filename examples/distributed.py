"""Digits on several workers: what each way sends, and what the model learns.

    torchrun --nproc-per-node=2 examples/distributed.py

Called without torchrun, it starts itself with two workers.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
from dome.compression import HadamardSketch
from dome.paper.models.resnet8 import resnet8
from dome.paper.tasks.digits import digits

RANK, BATCH = 32, 32  # directions removed; samples a step, of all workers together


def attach(way, model, optimizer, rate):
    """The filter of a way to train, or None for plain DDP."""
    compress = dome.distributed.attach
    if way == "ddp":
        return None
    if way in ("worker", "per_sample"):
        return compress(model, optimizer, RANK, samples=way)
    if way == "sketch":  # a filter that removes nothing and takes no samples
        idle = {"strength": 0.0, "update_every": 10**9}
        return compress(model, optimizer, 1, HadamardSketch(rate), **idle)
    if way == "simulation":  # one process with the whole batch, for comparison
        sketch = HadamardSketch(rate)
        return dome.attach(model, optimizer, RANK, after=sketch)
    share = way if way == "own" else int(way)
    return compress(model, optimizer, RANK, HadamardSketch(rate), share=share)


def train(way, seed, options):
    """Accuracy, bytes a step, DDP's bytes a step and seconds a step of one run."""
    task = digits(size=options.size)
    torch.manual_seed(seed)
    model = resnet8(in_channels=1)
    alone = way == "simulation"
    model = model if alone else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    grad_filter = attach(way, model, optimizer, options.rate)
    order = torch.Generator().manual_seed(seed)
    begin, num_steps = time.perf_counter(), 0
    for _ in range(options.epochs):
        for batch in torch.randperm(len(task.train_x), generator=order).split(BATCH):
            if len(batch) < BATCH:
                continue
            parts = batch.chunk(dist.get_world_size())
            own = batch if alone else parts[dist.get_rank()]
            optimizer.zero_grad()
            cross_entropy(model(task.train_x[own]), task.train_y[own]).backward()
            optimizer.step()
            num_steps += 1
    seconds = (time.perf_counter() - begin) / num_steps
    with torch.no_grad():
        answers = model(task.test_x).argmax(dim=1)
    accuracy = (answers == task.test_y).double().mean().item()
    num_workers = dist.get_world_size()
    dim = sum(p.numel() for p in model.parameters())
    ddp = 2 * (num_workers - 1) / num_workers * 4 * dim
    sent = ddp if way == "ddp" else 0.0
    if grad_filter is not None and not alone:
        sent = grad_filter.stats.total_bytes_sent / num_steps
    return accuracy, sent, ddp, seconds


def main():
    parser = argparse.ArgumentParser()
    ways = ["ddp", "worker", "per_sample", "sketch", "own"]
    parser.add_argument("--ways", nargs="+", default=ways)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        heads = f"{'way':<12}{'kB a step':>10}{'of DDP':>9}{'accuracy':>18}"
        print(heads + f"{'ms a step':>11}")
    for way in options.ways:
        runs = [train(way, seed, options) for seed in range(options.seeds)]
        accuracy, sent, ddp, seconds = torch.tensor(runs, dtype=torch.float64).T
        spread = accuracy.std(correction=0)
        if first:
            print(
                f"{way:<12}{sent.mean() / 1e3:>10.2f}{(sent / ddp).mean():>8.4f}x"
                f"{accuracy.mean():>10.3f} ± {spread:.3f}{1e3 * seconds.mean():>11.1f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node=2", __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
