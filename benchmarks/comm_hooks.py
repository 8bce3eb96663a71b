"""What a filter in DDP's communication hook sends, with and without PowerSGD.

P workers train ResNet-8 on digits over a link of 50 Mbit/s: a network namespace whose
loopback is shaped by tc, which also counts every byte, headers included. Needs root.
Rows are appended run by run; a second call computes what is missing, and prints the
table.

    python benchmarks/comm_hooks.py
    python benchmarks/comm_hooks.py --workers 2 --seeds 1 --epochs 1 --out rows.jsonl
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
from dome_lab.paper.models import resnet8
from dome_lab.paper.tasks.images import digits

OUT = Path(__file__).parents[1] / "docs/results/workers/comm_hooks.jsonl"
SENT = Path("/proc/net/dev")  # of this namespace; what is below /sys is not
RATE = "50mbit"
RANK, BATCH, CAP = 16, 32, 0.1  # of a layer; of all workers together; MB of a bucket
PER_SAMPLE = {"layout": "layerwise"}
WORKER = {"layout": "layerwise", "samples": "worker", "update_every": 10}
WAYS = {  # options of the filter, and whether PowerSGD sends
    "DDP": (None, False),
    "PowerSGD": (None, True),
    "dome": (PER_SAMPLE, False),
    "dome and PowerSGD": (PER_SAMPLE, True),
    "dome of workers and PowerSGD": (WORKER, True),
}


def bytes_sent() -> int:
    """By all workers so far, each over the same loopback."""
    (line,) = (line for line in SENT.read_text().splitlines() if "lo:" in line)
    return int(line.split()[9])


def train(way: str, seed: int, epochs: int) -> dict[str, Any]:
    """The row of a run."""
    torch.manual_seed(seed)
    options, powers = WAYS[way]
    # Over gloo, torch's PowerSGD alone waits for ever where DDP has several buckets.
    cap = 25 if powers and options is None else CAP
    model = DistributedDataParallel(resnet8(in_channels=1), bucket_cap_mb=cap)
    own, sends = None, None
    if powers:
        sends = torch_powersgd.powerSGD_hook
        own = torch_powersgd.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=10
        )
    if options is not None:
        own = dome.distributed.HookState(
            model, RANK, inner=sends, inner_state=own, **options
        )
        sends = dome.distributed.hook
    if sends is not None:
        model.register_comm_hook(own, sends)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    task, order = digits(), torch.Generator().manual_seed(seed)
    seconds, computing = [], time.process_time()
    dist.barrier()
    before = bytes_sent()
    for _ in range(epochs):
        for batch in torch.randperm(len(task.train_x), generator=order).split(BATCH):
            part = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
            begin = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(task.train_x[part]), task.train_y[part]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
    dist.barrier()
    sent = bytes_sent() - before
    with torch.no_grad():
        answers = model.module(task.test_x).argmax(dim=1)
    return {
        "way": way,
        "num_workers": dist.get_world_size(),
        "seed": seed,
        "epochs": epochs,
        "num_steps": len(seconds),
        "rate": RATE,
        "bytes_per_worker_and_step": sent / dist.get_world_size() / len(seconds),
        "median_seconds": statistics.median(seconds),
        "processor_seconds": (time.process_time() - computing) / len(seconds),
        "test_accuracy": (answers == task.test_y).double().mean().item(),
    }


def work(options: argparse.Namespace) -> None:
    """Train as one of the workers; the first one stores the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = train(options.way, options.seed, options.epochs)
    if dist.get_rank() == 0:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def launch(way: str, seed: int, num_workers: int, options: argparse.Namespace) -> None:
    """Workers of one run, in a namespace of their own."""
    shape = f"tc qdisc add dev lo root tbf rate {RATE} burst 128kb latency 500ms"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-m", "torch.distributed.run", f"--master-port={port}"]
    run += [f"--nproc-per-node={num_workers}", __file__, "--way", way]
    run += ["--seed", str(seed), "--epochs", str(options.epochs)]
    words = [*run, "--out", str(options.out)]
    script = f'ip link set lo up && {shape} && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, check=True, env=environment)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print means over seeds."""
    for num_workers in sorted({row["num_workers"] for row in rows}):
        ours = [row for row in rows if row["num_workers"] == num_workers]
        plain = [r["bytes_per_worker_and_step"] for r in ours if r["way"] == "DDP"]
        for way in WAYS:
            ends = [row for row in ours if row["way"] == way]
            if not ends:
                continue
            means = {
                name: statistics.fmean(row[name] for row in ends)
                for name in list(ends[0])[6:]  # those that are measured
            }
            sent = means["bytes_per_worker_and_step"]
            share = sent / statistics.fmean(plain) if plain else float("nan")
            each = " ".join(f"{row['test_accuracy']:.3f}" for row in ends)
            print(
                f"{num_workers} {way:<30}{sent:>10,.0f} bytes {share:.3f} "
                f"{means['median_seconds']:.3f} s {means['processor_seconds']:.3f} s "
                f"of CPU, accuracy {means['test_accuracy']:.3f} ({each})"
            )


def main() -> None:
    """Start what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    stored = options.out.read_text() if options.out.exists() else ""
    known = [json.loads(line) for line in stored.splitlines()]
    there = {(r["way"], r["seed"], r["num_workers"], r["epochs"]) for r in known}
    for seed in range(options.seeds):
        for num_workers in options.workers:
            for way in WAYS:
                if (way, seed, num_workers, options.epochs) not in there:
                    launch(way, seed, num_workers, options)
    table([json.loads(line) for line in options.out.read_text().splitlines()])


if __name__ == "__main__":
    main()
