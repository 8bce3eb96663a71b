"""Which models of ``fully_shard`` can be filtered; the others are refused by name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dome.distributed.reduce_scatter import sharded_modules
from dome.options import FilterOptions
from dome.parameters import Layout
from dome.torch_private import fsdp_communication, fsdp_groups

OLDEST = "2.9"  # the first torch with FSDPModule.set_custom_reduce_scatter


def check_supported(model: nn.Module, samples: str, options: FilterOptions) -> None:
    """Raise ``ValueError`` for a model or options that cannot be."""
    _check_options(samples, options)
    sharded: set[int] = set()
    for module in sharded_modules(model):
        _check_module(module)
        module.reshard()  # after a forward pass the model may have whole parameters
        for group in fsdp_groups(module):
            sharded |= {id(p.sharded_param) for p in group.fsdp_params}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in sharded:
            raise ValueError(
                f"parameter {name!r} is trained, but not sharded by fully_shard: its "
                f"gradient would stay local. Call fully_shard for the whole model too, "
                f"or freeze it"
            )


def workers_of(layout: Layout) -> dist.ProcessGroup:
    """The workers that hold the parameters, each some of their first dimensions."""
    pairs = zip(layout.slots, layout.parameters, strict=True)
    first, *others = [_workers_of(slot.name, p) for slot, p in pairs]
    if any(group is not first for group in others):
        raise ValueError(
            "the parameters are sharded over different meshes: shard all of them over "
            "one mesh with one dimension"
        )
    return first


def _check_options(samples: str, options: FilterOptions) -> None:
    if samples != "worker":
        raise ValueError(
            f'a model of fully_shard takes samples="worker", each worker\'s gradient, '
            f"got {samples!r}: no worker has the whole gradient of a sample"
        )
    if options.stages:
        raise ValueError(
            "after gets the whole filtered gradient, which no worker of fully_shard "
            "has: leave it out, and clip with torch.nn.utils.clip_grad_norm_"
        )
    if callable(options.tracker):
        raise ValueError(
            'with fully_shard the tracker must be "power" or "svd": the state of your '
            "own tracker cannot be split over workers"
        )


def _check_module(module: Any) -> None:  # noqa: ANN401 (an FSDPModule, slow to import)
    if not hasattr(module, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter, "
            f"through which workers see each other's gradients: use torch {OLDEST} or "
            f"newer, or DistributedDataParallel"
        )
    groups = fsdp_groups(module)
    if len(groups) > 1:
        raise ValueError(
            f"fully_shard made {len(groups)} groups of the parameters of "
            f"{type(module).__name__}, because its shard_placement_fn uses several "
            "meshes: shard over one mesh"
        )
    for group in groups:
        comm, _ = fsdp_communication(group)
        if not type(comm).__module__.startswith("torch."):
            raise ValueError(
                f"{type(module).__name__} already has a reduce-scatter, "
                f"{type(comm).__name__}, and the filter must set its own: detach the "
                "other filter, or leave out set_custom_reduce_scatter"
            )


def _workers_of(name: str, p: Any) -> dist.ProcessGroup:  # noqa: ANN401 (a DTensor)
    if p.device_mesh.ndim > 1:
        hybrid = any(placement.is_replicate() for placement in p.placements)
        way = "hybrid sharding (HSDP)" if hybrid else "tensor parallelism with FSDP2"
        raise ValueError(
            f"parameter {name!r} lies on a mesh of {p.device_mesh.ndim} dimensions: "
            f"{way} is not supported, use fully_shard over a mesh of one dimension"
        )
    (placement,) = p.placements
    if not placement.is_shard(0):
        raise ValueError(
            f"parameter {name!r} is split along dimension {placement.dim}: a basis is "
            f"split along the first, leave out shard_placement_fn"
        )
    group: dist.ProcessGroup = p.device_mesh.get_group()
    return group
