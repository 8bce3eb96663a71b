"""Models whose samples cannot be captured, refused by name before training starts."""

import torch
from torch import nn

from dome.torch_private import AnyBatchNorm, is_compiled


def check_one_process(model: nn.Module) -> None:
    """Raise ``ValueError`` if this model is spread over workers or devices."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            raise ValueError(
                f"the model is spread over workers by {type(module).__name__}: each "
                "would turn a basis its own way and their parameters would drift "
                "apart; use dome.distributed.attach"
            )
        # By name: importing them takes longer than all of dome.
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(split_over_workers("the model"))
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise ValueError(split_over_workers(f"parameter {name!r}"))


def split_over_workers(what: str) -> str:
    """The sentence for parameters of which a worker holds a part."""
    return (
        f"{what} is split over workers (FSDP, tensor parallelism): dome.attach takes "
        "whole gradients. Use dome.distributed.attach: for a model of fully_shard with "
        'samples="worker", for others in DistributedDataParallel'
    )


def check_capturable(model: nn.Module) -> None:
    """Raise ``ValueError`` if per-sample gradients of this model cannot be captured."""
    check_one_process(model)
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a TorchScript module, whose operations cannot be seen: "
                'use the Python module, or samples="microbatch"'
            )
        if is_compiled(module):
            raise ValueError(
                f"{where} is compiled by torch.compile: its operations cannot be seen; "
                "attach to the model as it was before torch.compile and compile it "
                'afterwards, or use samples="microbatch"'
            )
        if isinstance(module, AnyBatchNorm) and module.training:
            raise ValueError(mixes_samples(where))


def reentrant(name: str) -> str:
    """The sentence for a parameter under reentrant activation checkpointing."""
    return (
        f"parameter {name!r} is used under reentrant activation checkpointing, whose "
        "graph is built during backward(), where samples are not captured: pass "
        "use_reentrant=False to checkpoint(), or to Transformers "
        'gradient_checkpointing_kwargs={"use_reentrant": False}; or use '
        'samples="microbatch"'
    )


def not_understood(name: str) -> str:
    """The sentence for a checkpoint that was not entered by torch's function."""
    return (
        f"parameter {name!r} is used under activation checkpointing that was not "
        "entered by torch.utils.checkpoint.checkpoint(): use that function, switch "
        'checkpointing off, or use samples="microbatch"'
    )


def mixes_samples(where: str) -> str:
    """The sentence for batch norm in training mode."""
    return (
        f"{where} is batch norm in training mode, which mixes the samples of a batch: "
        'replace it by GroupNorm, call .eval() on it, or use samples="microbatch"'
    )
