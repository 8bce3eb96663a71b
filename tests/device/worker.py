"""One of two workers: trains on the simulated device and on the CPU, and compares.

Started by forked.py, with WORKER NUM_WORKERS FOLDER.
"""

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from models import batches, small_classifier
from simulated_device import register, simulated_device
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
import dome.distributed
from dome.compression import HadamardSketch

WAYS = {
    "per_sample": {},
    "layer-wise": {"layout": "layerwise"},
    "svd": {"tracker": "svd"},
    "worker": {"samples": "worker", "rank": 1},
    "compressed": {"compressor": lambda: HadamardSketch(4.0)},
}


def trained(worker, place, compressor=None, rank=4, **options):
    """Where half of every batch leads: the parameters (D,), on the CPU."""
    model = DistributedDataParallel(small_classifier().to(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = compressor and compressor()
    grad_filter = dome.distributed.attach(model, optimizer, rank, made, **options)
    for x, y in batches(torch.Generator().manual_seed(7), 3):
        optimizer.zero_grad()
        mine, targets = (t.chunk(2)[worker].to(place) for t in (x, y))
        cross_entropy(model(mine), targets).backward()
        optimizer.step()
    grad_filter.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def main():
    worker, folder = int(sys.argv[1]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Two workers with few samples each: what they send is not looked at here.
    warnings.filterwarnings("ignore", message=".* times the bytes of DDP")
    register()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=worker,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    apart = {}
    for name, options in WAYS.items():
        here = trained(worker, "cpu", **options)
        with simulated_device() as device:
            there = trained(worker, device.name, **options)
        apart[name] = float((there - here).abs().max())
    (folder / f"{worker}.json").write_text(json.dumps(apart))
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
