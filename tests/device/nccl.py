"""One of two workers over nccl, in a file that a new process can import."""

import os

import torch
import torch.distributed as dist
from device.training import flat, seeded_batches
from models import small_classifier
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome.distributed


def nccl_worker(worker, port, folder, backend="nccl"):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    place, ids = "cpu", None  # with gloo, to try this program without a GPU
    if backend == "nccl":
        ids = [worker % torch.cuda.device_count()]
        place = f"cuda:{ids[0]}"
        torch.cuda.set_device(place)
    dist.init_process_group(backend, rank=worker, world_size=2)
    model = DistributedDataParallel(small_classifier().to(place), device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dome.distributed.attach(model, optimizer, 4, tracker="svd")
    for x, y in seeded_batches(3, torch.float64):
        mine, targets = (t.chunk(2)[worker].to(place) for t in (x, y))
        optimizer.zero_grad()
        cross_entropy(model(mine), targets).backward()
        optimizer.step()
    torch.save(flat(model).cpu(), folder / f"{worker}.pt")
    dist.destroy_process_group()
