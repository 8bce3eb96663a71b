"""DDP without its all-reduce: gradients stay those of the worker.

A DDP model takes one communication hook in its life. Ours is registered once, and is
DDP's own all-reduce again while no filter is attached.
"""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class LocalGradients:
    """Whether the gradients of a DDP model stay local.

    Args:
        group: The workers of the model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.keep = False


_switches: "weakref.WeakKeyDictionary[DistributedDataParallel, LocalGradients]" = (
    weakref.WeakKeyDictionary()
)


def local_gradients(model: DistributedDataParallel) -> LocalGradients:
    """The switch of a DDP model, registered with it at the first call."""
    switch = _switches.get(model)
    if switch is None:
        switch = LocalGradients(model.process_group)
        try:
            model.register_comm_hook(switch, _hook)
        except RuntimeError as error:
            raise ValueError(
                "this DDP model has a communication hook already, and takes only one: "
                "wrap the module in a new DistributedDataParallel"
            ) from error
        _switches[model] = switch
    return switch


def _hook(
    switch: LocalGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # torch's stubs lack it
) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    if switch.keep:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    buffer.div_(dist.get_world_size(switch.group))
    work = dist.all_reduce(buffer, group=switch.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
