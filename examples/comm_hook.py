"""Digits on two workers: DDP's communication hook is a filter in front of PowerSGD.

    torchrun --standalone --nproc-per-node=2 examples/comm_hook.py

Called without torchrun, it starts itself with two workers.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
from dome_lab.paper.models import resnet8
from dome_lab.paper.tasks.images import digits

RANK, BATCH, STEPS = 16, 32, 60  # directions of a layer; samples a step, of all workers


def train(filtered):
    """Train with PowerSGD as the hook, and the filter in front of it or not."""
    torch.manual_seed(0)
    task, order = digits(), torch.Generator().manual_seed(0)
    model = DistributedDataParallel(resnet8(in_channels=1))
    low_rank = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=10
    )
    if filtered:
        state = dome.distributed.HookState(
            model,
            RANK,
            layout="layerwise",
            inner=powerSGD_hook.powerSGD_hook,
            inner_state=low_rank,
        )
        model.register_comm_hook(state, dome.distributed.hook)
    else:
        model.register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(task.train_x), (BATCH,), generator=order)
        own = batch.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        cross_entropy(model(task.train_x[own]), task.train_y[own]).backward()
        optimizer.step()
    with torch.no_grad():
        answers = model.module(task.test_x).argmax(dim=1)
    accuracy = (answers == task.test_y).double().mean().item()
    return accuracy, state if filtered else None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, _ = train(filtered=False)
    filtered, state = train(filtered=True)
    checkpoint = state.state_dict()  # all workers call it
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} workers, step {state.stats.step}: kept "
            f"{state.stats.kept_norm:.2f} of the gradient's norm, accuracy "
            f"{filtered:.3f} with the filter and {plain:.3f} without, "
            f"{len(checkpoint)} tensors to save"
        )
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node=2", __file__]
        sys.exit(subprocess.run(command, check=False).returncode)
