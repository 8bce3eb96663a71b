"""Own bases or shared ones? Two workers at rate 1,000, against the simulation.

The simulation is figure 3's at rate 1,000: one process filters the gradient of the
whole batch and sketches it. Here P workers have a part of the same batch each, filter
their own gradients and send sketches, with a basis of their own ("own") or one that is
brought together every n steps ("100"). Rows are stored run by run; a second call
computes what is missing, and prints the table.

    torchrun --standalone --nproc-per-node=2 benchmarks/workers_mnist.py
    torchrun --standalone --nproc-per-node=2 benchmarks/workers_mnist.py --scale smoke
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import dome
from dome import GradientFilter
from dome.compression import Compressor, GaussianSketch, HadamardSketch
from dome_lab.paper.device import (
    FIRST_BASIS,
    INITIAL_WEIGHTS,
    SAMPLE_ORDER,
    SKETCH_NOISE,
    generator,
)
from dome_lab.paper.figures.fig03_mnist_compression import SCALES
from dome_lab.paper.models import make_model
from dome_lab.paper.rows import (
    TRAINING,
    Key,
    Row,
    append_run,
    mend,
    read_runs,
    record_session,
)
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run, evaluate, load_run_task

RATE = 1000
SKETCHES = {"gaussian": GaussianSketch, "hadamard": HadamardSketch}
SIMULATIONS = ("simulation", "simulation plain")
# In the order of what they are worth to us, should time run out.
WAYS = (
    "gaussian own",
    "hadamard own",
    "hadamard 100",
    "hadamard plain",
    "hadamard 10",
    "gaussian plain",
)
RESULTS = Path(__file__).parents[1] / "docs/results"
STORED = RESULTS / "cpu/fig03_mnist_compression.jsonl"
OUT = RESULTS / "workers/workers_mnist.jsonl"


def main() -> None:
    """Compute the runs that are missing, then print the table on the first worker."""
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        mend(options.out)
        facts = {"what": __doc__, "num_workers": dist.get_world_size()}
        record_session(options.out, facts, "cpu")
    dist.barrier()
    known = read_runs([options.out, STORED])
    config = SCALES[options.scale]
    for way in (*SIMULATIONS, *options.ways):
        ends = []
        for seed in range(options.seeds or config.num_seeds):
            run = replace(config.run, seed=seed, rate=RATE)
            if way.endswith("plain"):
                run = replace(run, rank=None)
            key = (TRAINING if way in SIMULATIONS else _maker(way), run)
            rows = known.get(key) or _stored(options.out, key, way, first)
            ends += rows[-1:]
        if first:
            print(_line(way, ends), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--seeds", type=int, help="the figure's own, if not given")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def _maker(way: str) -> str:
    """What sets the rows of a way apart."""
    return f"{dist.get_world_size()} workers, {way}"


def _stored(path: Path, key: Key, way: str, first: bool) -> list[Row]:
    maker, run = key
    if way not in SIMULATIONS:
        rows = list(_train(run, way))
    else:
        rows = list(compute_run(run)) if first else []
    return append_run(path, rows, maker) if first else rows


def _train(run: Run, way: str) -> Iterator[Row]:
    """Rows of a run on all workers; the first one's are stored."""
    task = load_run_task(run)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(run.seed, INITIAL_WEIGHTS).initial_seed())
        model = DistributedDataParallel(make_model(run.model, task))
    optimizer = Adam(model.parameters(), lr=run.lr)
    grad_filter = _attach(model, optimizer, run, way)
    order = generator(run.seed, SAMPLE_ORDER)
    for epoch in range(1, run.epochs + 1):
        started, losses = time.perf_counter(), []
        shuffled = torch.randperm(len(task.train_x), generator=order)
        for batch in shuffled.split(run.batch_size):
            if len(batch) < run.batch_size:
                continue
            own = batch.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            loss = cross_entropy(model(task.train_x[own]), task.train_y[own])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - started
        stats = grad_filter.stats
        yield Row(
            **run.columns(),
            way=way,
            num_workers=dist.get_world_size(),
            epoch=epoch,
            train_loss=statistics.fmean(losses),
            **evaluate(model.module, task.test_x, task.test_y),
            kept_norm=stats.kept_norm,
            fraction=stats.fraction,
            num_steps=stats.step,
            total_bytes_sent=stats.total_bytes_sent,
            total_ddp_bytes=stats.total_ddp_bytes,
            seconds=seconds,
        )
    grad_filter.detach()


def _attach(
    model: DistributedDataParallel, optimizer: Optimizer, run: Run, way: str
) -> GradientFilter:
    name, share = way.split()
    seed = generator(run.seed, SKETCH_NOISE).initial_seed()
    compressor: Compressor = SKETCHES[name](RATE, seed=seed)
    if share == "plain":  # takes no samples after the first step, removes nothing
        idle = {"strength": 0.0, "update_every": 10**9}
        return dome.distributed.attach(model, optimizer, 1, compressor, **idle)
    return dome.distributed.attach(
        model,
        optimizer,
        run.rank,
        compressor,
        share=share if share == "own" else int(share),
        generator=generator(run.seed, FIRST_BASIS),
    )


def _line(way: str, ends: list[Row]) -> str:
    """Accuracy of each seed at the end, and what was sent for it."""
    accuracies = [float(end["test_accuracy"]) for end in ends]
    each = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
    text = f"{way:<16} accuracy {statistics.fmean(accuracies):.3f}  ({each})"
    if way in SIMULATIONS:
        return text
    sent = sum(end["total_bytes_sent"] for end in ends)
    ddp = sum(end["total_ddp_bytes"] for end in ends)
    steps = sum(end["num_steps"] for end in ends)
    return f"{text}  {sent / steps:,.0f} bytes a step, {sent / ddp:.5f} of DDP's"


if __name__ == "__main__":
    main()
