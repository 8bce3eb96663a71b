"""Digits on two workers: DDP's communication hook is a filter in front of PowerSGD.

    torchrun --standalone --nproc-per-node=2 examples/comm_hook.py

Called without torchrun, it starts itself with two workers.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
from dome_lab.paper.models import resnet8
from dome_lab.paper.tasks.images import digits

RANK, BATCH, STEPS = 16, 32, 60  # directions of a layer; samples a step, of all workers


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    task, order = digits(), torch.Generator().manual_seed(0)
    model = DistributedDataParallel(resnet8(in_channels=1), bucket_cap_mb=0.1)
    state = dome.distributed.HookState(
        model,
        RANK,
        layout="layerwise",
        inner=torch_powersgd.powerSGD_hook,
        inner_state=torch_powersgd.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=10
        ),
    )
    model.register_comm_hook(state, dome.distributed.hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(task.train_x), (BATCH,), generator=order)
        own = batch.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        cross_entropy(model(task.train_x[own]), task.train_y[own]).backward()
        optimizer.step()
    checkpoint = state.state_dict()  # all workers call it
    with torch.no_grad():
        answers = model.module(task.test_x).argmax(dim=1)
    accuracy = (answers == task.test_y).double().mean().item()
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} workers, step {state.stats.step}: kept "
            f"{state.stats.kept_norm:.2f} of the gradient's norm, accuracy "
            f"{accuracy:.3f}, {len(checkpoint)} tensors to save"
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
