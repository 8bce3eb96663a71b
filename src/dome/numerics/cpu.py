"""What only serves a CPU's caches, threads and memory, with constants tuned for one.

Shapes: S (D, K) tall. Tuned on two cores of an x86 server, ResNet-8 with D = 78,042
parameters, K = 100. Of a filtered step on two threads, at B = 16 and 128, they gain:
PIECE_ROWS 9 and 1 %, VIEW_ROWS 7 and 3 %, ``subtract_`` 5 and 3 %; on one thread
nothing. ``weighted_rows`` gains 3.5 % of a step with ``update_every=10``. BLOCK_NUMBERS
bounds memory. ``benchmarks/cpu_habits.py`` measures it, and
docs/architecture.md has the table.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

# Numbers that are converted or written at a time: beside U and the samples, only so
# much exists.
BLOCK_NUMBERS = 500_000
# Rows that are read at a time where nothing is converted: only products take room.
VIEW_ROWS = 131_072
# Rows of the short products that a long one is cut into: each fits a core's cache, and
# they run on all threads, where a product with few rows or columns runs on one.
PIECE_ROWS = 2048
# Numbers in the products of such pieces, before these are added up.
SUMMANDS = 4_000_000
# Options of mallopt(3), and what they are set to: how much of what is freed is kept,
# and the largest block that is, to which glibc comes by itself in time. Blocks of a
# large model leave holes in what is kept: BERT-base with directions of low rank had its
# peak at 3.54 GB, and has it at 3.34 since blocks from 8 MiB on are given back, in the
# same time. From 4 MiB on it is as much, and GPT-2 took a tenth longer. Large is a
# model whose parameters alone would take what is kept.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 27
LARGEST_KEPT = {False: 1 << 25, True: 1 << 23}
# Where a user has told glibc what to keep.
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_is_large = False


def keep_what_steps_free(num_bytes: int = 0) -> bool:
    """Let glibc keep up to 128 MiB of what is freed, once for this process.

    By itself it gives nearly all of it back to the system, and the next step has it
    handed out again, page by page, each zeroed: a fifth of a step of ResNet-8, with
    the filter or without. A glibc that was told by its environment what to keep is
    left alone, and other allocators do not mind.

    Args:
        num_bytes: What the parameters of a model take; the largest model decides.

    Returns:
        Whether it listens.
    """
    global _is_large  # noqa: PLW0603 - one process, one heap
    _is_large = _is_large or num_bytes > KEPT
    if sys.platform != "linux" or any(name in os.environ for name in TOLD):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (M_MMAP_THRESHOLD, LARGEST_KEPT[_is_large]), (M_TRIM_THRESHOLD, KEPT)
    return all(bool(mallopt(*option)) for option in options)


def weighted_rows(weights: Tensor, S: Tensor) -> Tensor:
    """w S for one row of weights (1, D), summed in float64, shape (1, K).

    As the bags of an embedding, whose kernel fetches rows ahead: torch's product with a
    vector waits for memory on every row.
    """
    index, starts = _positions(len(S))
    # Not through ``functional``, whose checks take a fifth of the time.
    sums, *_ = torch.embedding_bag(S, index, starts, False, 0, False, weights[0])
    return sums.sum(dim=0, keepdim=True, dtype=torch.float64)


def subtract_(vector: Tensor, S: Tensor, c: Tensor) -> None:
    """v ← v − S c in place for v (D,) and c (K,): short pieces in a batch."""
    num, length = pieces(len(S), PIECE_ROWS)
    end = num * length
    # The transpose of a row and not a column: torch goes by strides, and takes a path
    # for the one that is six times as fast as that for the other.
    column = c.expand(num, 1, -1).mT
    tall = S[:end].unflatten(0, (num, length))
    vector[:end].view(num, length, 1).baddbmm_(tall, column, alpha=-1)
    if end < len(S):
        vector[end:].addmv_(S[end:], c, alpha=-1)


def pieces(num_rows: int, most: int) -> tuple[int, int]:
    """How many pieces of how many rows there are; fewer rows may be left over."""
    length = min(most, num_rows)
    return (num_rows // length if length else 0), length


def slices(num_rows: int, size: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows, at most ``size`` each."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _positions(num_rows: int) -> tuple[Tensor, Tensor]:
    """0, 1, 2, ... and where pieces of it begin."""
    num_pieces = -(-num_rows // PIECE_ROWS)
    index, starts = _many_positions(num_pieces * PIECE_ROWS)
    return index[:num_rows], starts


@lru_cache(maxsize=8)
def _many_positions(num_rows: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # kept, and used outside of it later
        index = torch.arange(num_rows, device="cpu")
        return index, index[::PIECE_ROWS].contiguous()
