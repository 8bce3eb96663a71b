"""Bytes that a filter takes, bytes that there are, and the rank that fits into them.

Letters: D parameters, K directions, B samples.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from dome.trackers.linalg import block_rows
from dome.trackers.thin import SMALL_WEIGHT, is_thin

FLOAT = 4  # bytes of a number in gradients and samples
SMALL = 8  # and in matrices of K or B rows


def filter_memory(
    dims: Sequence[int],
    rank: int,
    batch_size: int,
    itemsize: int,
    stream: bool = False,
) -> int:
    """Bytes of bases, samples, one block of rows, small matrices, gradient copies.

    Args:
        dims: D of each basis.
        rank: K, which no basis has more of than it has rows.
        batch_size: B.
        itemsize: Bytes in which a number of a basis is stored.
        stream: There are samples of one basis at a time.
    """
    basis = sum(dim * min(rank, dim) for dim in dims) * itemsize
    samples = (max(dims) if stream else sum(dims)) * batch_size * FLOAT
    a_row = min(rank, max(dims)) + batch_size
    block = min(block_rows(a_row), max(dims)) * a_row * FLOAT
    small = sum(min(rank, dim) ** 2 for dim in dims) + 3 * batch_size**2
    return basis + samples + block + SMALL * small + 3 * FLOAT * sum(dims)


def directions_memory(
    shapes: Sequence[torch.Size],
    rank: int,
    batch_size: int,
    direction_rank: int,
    outputs: int,
) -> int:
    """Bytes of directions of low rank, of samples that are rows, of output gradients.

    What samples of large weights are products of waits for the step: inputs, which
    training has at its peak anyway, and output gradients.

    Args:
        shapes: Of the parameters.
        rank: K.
        batch_size: B.
        direction_rank: r.
        outputs: Numbers that a sample has behind weights of more than ``SMALL_WEIGHT``.
    """
    dim = sum(s.numel() for s in shapes)
    thin = [s for s in shapes if is_thin(s, direction_rank, dim)]
    plain = dim - sum(s.numel() for s in thin)
    sides = sum(s[0] + s[1:].numel() for s in thin)
    stored = rank * (direction_rank * sides + plain)
    small = [s.numel() for s in thin if s.numel() <= SMALL_WEIGHT]
    # Written out for a moment, one weight after the other.
    written = 2 * rank * max(small, default=0)
    widest = max((s[0] + s[1:].numel() for s in thin), default=0)
    step = 4 * rank * direction_rank * widest
    rows = batch_size * (plain + sum(small) + outputs)
    # Old and new directions, and products on the way from one to the other.
    return FLOAT * (3 * stored + written + step + rows) + 3 * SMALL * rank**2


def num_outputs(model: nn.Module, positions: int) -> int:
    """How many numbers a sample has behind the large trainable weights of a model.

    A weight matrix of any module that is neither linear nor an embedding may be meant
    either way round: its longer side counts.

    Args:
        model: The model.
        positions: How many positions of a sample each weight meets.
    """
    total = 0
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if (
                weight.requires_grad
                and weight.ndim > 1
                and weight.numel() > SMALL_WEIGHT
            ):
                n, m = weight.shape[0], weight.shape[1:].numel()
                if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    total += m
                elif isinstance(module, nn.Linear) or weight.ndim > 2:
                    total += n
                else:
                    total += max(n, m)
    return positions * total


def largest_rank(memory: Callable[[int], float], most: int, available: float) -> int:
    """The largest K whose memory is available, by bisection; 0 if none is.

    Args:
        memory: Bytes by K, never falling.
        most: No K is larger.
        available: Bytes.
    """
    fitting, too_much = 0, most + 1
    while too_much - fitting > 1:
        middle = (fitting + too_much) // 2
        if memory(middle) <= available:
            fitting = middle
        else:
            too_much = middle
    return fitting


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
