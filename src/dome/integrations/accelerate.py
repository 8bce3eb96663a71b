"""The filter for a model and an optimizer that ``Accelerator.prepare`` returned.

Accelerate wraps the optimizer, and with several processes the model. The filter goes on
the optimizer inside, which Accelerate steps once the accumulated gradient is complete.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import dome.distributed
from dome.attachment import attach as attach_here
from dome.compression import Compressor
from dome.distributed.attachment import SAMPLES, check_compressor, check_share
from dome.filter import GradientFilter
from dome.options import FilterOptions, Options


class TrainerOptions(Options, total=False):
    """Options of a filter in somebody else's loop, which knows the number of workers.

    Attributes:
        parameters: As in ``dome.attach``; in one process only, like the next two.
        stream: As in ``dome.attach``.
        scaler: As in ``dome.attach``; the trainer's own if not given.
        samples: Those of ``dome.attach``, or of ``dome.distributed.attach``.
        compressor: As in ``dome.distributed.attach``; on workers only, like the next.
        share: As in ``dome.distributed.attach``.
    """

    parameters: Iterable[Tensor | str] | str | None
    stream: bool
    scaler: torch.amp.GradScaler | None
    samples: str
    compressor: Compressor | None
    share: str | int


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int | Mapping[str, int],
    **options: Unpack[TrainerOptions],
) -> GradientFilter:
    """Filter the gradients of every step of a prepared optimizer from now on.

    Call it after ``accelerator.prepare``. To have the filter in the checkpoints of
    ``accelerator.save_state``, call ``accelerator.register_for_checkpointing`` with it.

    Args:
        model: The prepared model. One in ``DistributedDataParallel`` gets the filter of
            ``dome.distributed.attach``.
        optimizer: The prepared optimizer.
        rank: Number of directions K to remove.
        **options: Those of ``dome.attach``, or of ``dome.distributed.attach``.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    inner, scaler = unwrapped(optimizer)
    given: dict[str, Any] = {**options}
    if scaler is not None:
        given.setdefault("scaler", scaler)
    if isinstance(model, DistributedDataParallel):
        return dome.distributed.attach(model, inner, rank, **given)
    return attach_here(model, inner, rank, **given)


def check_options(
    owner: str, rank: int | Mapping[str, int], options: Mapping[str, Any]
) -> None:
    """Refuse options that neither filter takes, before there is a model.

    Args:
        owner: Whose options they are.
        rank: Number of directions.
        options: As in ``TrainerOptions``.
    """
    given = {**options, "rank": rank}
    given.pop("parameters", None)
    compressor = given.pop("compressor", None)
    check_compressor(compressor)
    share = given.pop("share", "own")
    if compressor is not None:
        check_share(share, compressor)
    if given.get("samples") == "worker":
        given["samples"] = SAMPLES["worker"]
    FilterOptions.named(owner, given)
    for number in rank.values() if isinstance(rank, Mapping) else (rank,):
        if number < 1:
            raise ValueError(f"rank must be at least 1, got {number}")


def unwrapped(optimizer: Optimizer) -> tuple[Optimizer, Any]:
    """The optimizer inside Accelerate's wrapper, and its GradScaler or None."""
    scaler = None
    # By attribute, not by class: this file does not need Accelerate to be imported.
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        scaler = scaler or getattr(optimizer, "scaler", None)
        optimizer = inner
    return optimizer, scaler
