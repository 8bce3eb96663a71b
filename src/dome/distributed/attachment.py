"""``attach``: the filter across workers, as one line in a training loop."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dome.compression import Compressor
from dome.distributed.copied import CopiedDirections
from dome.distributed.fully_shard import FullyShard
from dome.distributed.handshake import check_same_options
from dome.distributed.local import check_switchable
from dome.distributed.messages import Messages
from dome.distributed.reduce_scatter import sharded_modules
from dome.distributed.split_basis import SplitBasis
from dome.distributed.workers import Workers
from dome.filter import GradientFilter
from dome.hooking import Newcomers, call_before_step, check_optimizer, held_by
from dome.options import FilterOptions, Options
from dome.parameters import Layout
from dome.samples.tracing.refuse import check_not_deepspeed
from dome.world import World

SAMPLES = {"per_sample": "per_sample", "worker": "microbatch"}


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int | Mapping[str, int],
    compressor: Compressor | None = None,
    *,
    samples: str = "per_sample",
    share: str | int = "own",
    **options: Unpack[Options],
) -> GradientFilter:
    """Filter the gradients of every ``optimizer.step()`` across workers from now on.

    DDP's own communication is switched off until ``detach()``, as in its ``no_sync()``:
    until ``optimizer.step()`` a worker's ``.grad`` is its own. Averaging follows DDP:
    every worker counts the same. A worker without samples at a step calls
    ``optimizer.step()`` all the same.

    A model of ``fully_shard`` reduces its gradients as ever, by an all-to-all of the
    same bytes, in which workers see each other's gradients.

    Args:
        model: The model that is trained, in ``DistributedDataParallel``, or after
            ``fully_shard`` (FSDP2, torch 2.9 or newer).
        optimizer: Any optimizer over all of its trainable parameters; with
            ``fully_shard`` those that it does not have are left alone.
        rank: Number of directions K to remove.
        compressor: Without one, the basis is split over workers, and gradients are
            exact. With one (every worker makes its own, alike), each worker filters its
            own gradient, and only messages travel.
        samples: "per_sample", which equals one process with the whole batch, and with
            B samples of a worker sends (B + 1) / 2 times the bytes of DDP; or "worker",
            each worker's local gradient (with gradient accumulation, each of its
            micro-batches), which costs the traffic of DDP, or of FSDP2; with
            ``fully_shard`` there is no other.
        share: With a compressor, how workers share bases: "own", not at all, or a
            number of steps after which they are brought together.
        **options: Those of ``dome.options.Options``; with ``fully_shard`` all but
            ``after``.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    check_optimizer(model, optimizer)
    check_compressor(compressor)
    owner = "dome.distributed.attach"
    given: dict[str, Any] = {**options}
    if given.pop("scaler", None) is not None:
        raise ValueError(
            "a GradScaler checks gradients before they are averaged, so one worker "
            "could skip a step that others take: train in bfloat16 without one"
        )
    if sharded_modules(model):
        if compressor is not None or share != "own":
            raise ValueError(
                "a compressor needs the whole gradient, which no worker of fully_shard "
                "has: use DistributedDataParallel, or leave the compressor out"
            )
        chosen = named_options(owner, rank, "worker", given)
        world: World = FullyShard(model, held_by(optimizer), chosen, samples)
        module = model
    else:
        ddp = in_ddp(model)
        parameters = _parameters(ddp, optimizer)
        chosen = named_options(owner, rank, samples, given)
        world = _ddp_world(ddp, parameters, chosen, compressor, share)
        module = ddp.module
    grad_filter = GradientFilter.in_world(world)
    call_before_step(optimizer, grad_filter, Newcomers(module, held_by(optimizer)))
    return grad_filter


def named_options(
    owner: str, rank: int | Mapping[str, int], samples: str, options: Mapping[str, Any]
) -> FilterOptions:
    """The options given by keywords to ``owner``, in words of workers."""
    if samples not in SAMPLES:
        raise ValueError(f"samples must be one of {tuple(SAMPLES)}, got {samples!r}")
    more = {"rank": rank, "samples": SAMPLES[samples]}
    chosen = FilterOptions.named(owner, {**options, **more})
    if chosen.stream:
        raise ValueError(
            "stream=True is not supported across workers: leave it out, since workers "
            "send samples at the step, or train in one process"
        )
    return chosen


def _ddp_world(
    model: DistributedDataParallel,
    parameters: list[Tensor],
    options: FilterOptions,
    compressor: Compressor | None,
    share: str | int,
) -> World:
    every = check_share(share, compressor)
    if compressor is not None and options.direction_rank is not None:
        raise ValueError(
            "direction_rank is not supported with a compressor across workers, where "
            "each has a basis of its own: leave out one of the two"
        )
    check_switchable(model)
    layout = Layout(model.module, options.layout, only=parameters)
    workers = Workers(model.process_group, layout.device)
    if compressor is not None:
        more = {"compressor": compressor, "share": share}
        check_same_options(workers, options, layout, **more)
        return Messages(model, layout, options, workers, compressor, every)
    check_same_options(workers, options, layout)
    kind = SplitBasis if options.direction_rank is None else CopiedDirections
    return kind(model, layout, options, workers)


def check_compressor(compressor: object) -> None:
    """Refuse what makes no messages."""
    is_one = hasattr(compressor, "decode") and not isinstance(compressor, type)
    if compressor is not None and not is_one:
        raise ValueError(
            f"compressor must be an object such as dome.compression.TopK(rate=100), "
            f"got {compressor!r}"
        )


def check_share(share: str | int, compressor: Compressor | None) -> int:
    """The number of steps between synchronisations, 0 for none."""
    if share == "own":
        return 0
    if compressor is None:
        raise ValueError(
            "share needs a compressor: without one all workers already hold one basis "
            "together"
        )
    if not isinstance(share, int) or isinstance(share, bool) or share < 1:
        raise ValueError(
            f'share must be "own" (a basis for each worker) or a number of steps '
            f"between synchronisations, got {share!r}"
        )
    return share


def _parameters(model: DistributedDataParallel, optimizer: Optimizer) -> list[Tensor]:
    """The parameters of the optimizer; refused unless they are all of the model's."""
    held = held_by(optimizer)
    known = {id(p) for p in held}
    for name, p in model.module.named_parameters():
        if p.requires_grad and id(p) not in known:
            raise ValueError(
                f"parameter {name!r} is trained, but not by this optimizer: its "
                f"gradient would stay local. Give the optimizer all parameters, or "
                f"freeze the others"
            )
    return held


def in_ddp(model: nn.Module) -> DistributedDataParallel:
    """The model; refused by name if it is not in ``DistributedDataParallel``."""
    if isinstance(model, DistributedDataParallel):
        return model
    if type(model).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            "FullyShardedDataParallel is the first FSDP, which hides the parameters "
            "that a basis belongs to: use fully_shard (FSDP2)"
        )
    check_not_deepspeed(model)
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError(
            "the model is split by tensor parallelism, which is not supported: use "
            "fully_shard (FSDP2) over a mesh of one dimension"
        )
    raise ValueError(
        f"model must be a DistributedDataParallel or a model of fully_shard, got "
        f"{type(model).__name__}: wrap it, or use dome.attach in one process"
    )
