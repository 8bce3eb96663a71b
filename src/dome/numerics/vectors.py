"""Products of a tall matrix with a single vector, on all threads of a CPU.

Shapes: U (D, K) tall. torch's own product with a vector runs on one thread and waits
for memory on every row; these take a half to a third of its time.
"""

from functools import lru_cache

import torch
from torch import Tensor

PIECE_ROWS = 2048  # of the pieces that products are summed over


def whole_pieces(num_rows: int) -> tuple[int, int]:
    """How many pieces of how many rows there are; fewer rows may be left over."""
    length = min(PIECE_ROWS, num_rows)
    return (num_rows // length if length else 0), length


def weighted_rows(weights: Tensor, U: Tensor) -> Tensor:
    """w U for one row of weights (1, D), summed in float64, shape (1, K).

    As the bags of an embedding, whose kernel fetches rows ahead.
    """
    index, starts = _positions(len(U))
    # Not through ``functional``, whose checks take a fifth of the time.
    sums, *_ = torch.embedding_bag(U, index, starts, False, 0, False, weights[0])
    return sums.sum(dim=0, keepdim=True, dtype=torch.float64)


def subtract_products_(v: Tensor, U: Tensor, c: Tensor) -> None:
    """v ← v − U c in place for v (D,) and coordinates (K,): short pieces in a batch."""
    num, length = whole_pieces(len(U))
    end = num * length
    # The transpose of a row and not a column: torch goes by strides, and takes a path
    # for the one that is six times as fast as that for the other.
    column = c.expand(num, 1, -1).mT
    pieces = U[:end].unflatten(0, (num, length))
    v[:end].view(num, length, 1).baddbmm_(pieces, column, alpha=-1)
    if end < len(U):
        v[end:].addmv_(U[end:], c, alpha=-1)


@lru_cache(maxsize=8)
def _many_positions(num_rows: int, length: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        index = torch.arange(num_rows, device="cpu")
        return index, index[::length].contiguous()


def _positions(num_rows: int) -> tuple[Tensor, Tensor]:
    """0, 1, 2, ... and where pieces of it begin, for the embeddings of a CPU."""
    num_pieces = -(-num_rows // PIECE_ROWS)
    index, starts = _many_positions(num_pieces * PIECE_ROWS, PIECE_ROWS)
    return index[:num_rows], starts
