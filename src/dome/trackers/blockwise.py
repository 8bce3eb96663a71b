"""One tracker for each block of the flat gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dome.numerics.shard import Shard
from dome.parameters import Block, Layout
from dome.trackers import TRACKERS, Tracker


def make_trackers(
    layout: Layout,
    rank: int | Mapping[str, int],
    tracker: str | Callable[[int, int], Tracker],
    options: Mapping[str, Any],
    basis_dtype: torch.dtype | None,
    shard_of: Callable[[Block], Shard] | None = None,
) -> tuple[tuple[Block, ...], tuple[Tracker, ...]]:
    """The blocks that are filtered, and a tracker for each.

    Args:
        layout: The parameters and their blocks.
        rank: Directions a block, or by block name; blocks not named are left out.
        tracker: A name in ``TRACKERS``, or a function (dim, rank) -> tracker.
        options: oversample, forget and generator, for trackers chosen by name.
        basis_dtype: Storage of the bases; None for the parameters' own precision.
        shard_of: Which of a block's rows are held here, if not all; trackers then get
            it as the option ``shard``.
    """
    ranks = _ranks(layout, rank)
    blocks = tuple(block for block in layout.blocks if block.name in ranks)
    held = {b.name: {"shard": shard_of(b)} if shard_of else {} for b in blocks}
    if callable(tracker):
        if options["oversample"] or options["forget"] is not None:
            raise ValueError(
                "oversample and forget belong to the named trackers: "
                "set them in your own tracker's constructor"
            )
        make: Callable[..., Tracker] = tracker
        return blocks, tuple(make(b.dim, ranks[b.name], **held[b.name]) for b in blocks)
    if tracker not in TRACKERS:
        raise ValueError(
            f"tracker must be one of {tuple(TRACKERS)} or a function (dim, rank) -> "
            f"tracker, got {tracker!r}"
        )
    dtype = layout.dtype if basis_dtype is None else basis_dtype
    options = {"dtype": dtype, "device": layout.device, **options}
    make = TRACKERS[tracker]
    return blocks, tuple(
        make(b.dim, ranks[b.name], **options, **held[b.name]) for b in blocks
    )


def _ranks(layout: Layout, rank: int | Mapping[str, int]) -> dict[str, int]:
    names = [block.name for block in layout.blocks]
    if isinstance(rank, Mapping):
        unknown = sorted(set(rank) - set(names))
        if unknown or not rank:
            raise ValueError(
                f"rank names {unknown or 'no layer'}; the layers here are {names}"
            )
        return dict(rank)
    if len(names) == 1:
        return {names[0]: rank}
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    # A layer smaller than the rank is tracked whole.
    return {block.name: min(rank, block.dim) for block in layout.blocks}
