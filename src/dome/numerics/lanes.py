"""Passes that write to a tall matrix, each thread always to the same rows of it.

Shapes: U (D, K) tall, G (B, D) samples, T threads. A processor's threads may have
caches of their own, in which a pass leaves the rows it wrote. If another thread takes
them in the next pass, they have to move: with D = 78,042, K = 100 and two threads, that
more than doubles the time of adding Gᵀ X, B = 16. So rows are cut into T lanes of equal
length, and a block to work on is n rows of every lane.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dome.numerics.linalg import block_rows, slices

ALIGNED_BYTES = 32


def blocks(U: Tensor, G: Tensor | None, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of U (T, n, K) and of samples (T, n, B) that together cover all rows.

    Args:
        U: Tall matrix, shape (D, K).
        G: Samples, shape (B, D); None stands for none of them, B = 0.
        width: Numbers that are worked on for each row.
    """
    G = U.new_empty(0, len(U)) if G is None else G
    num = _num_lanes(U)
    length = len(U) // num
    end = num * length
    if length:
        tall = U[:end].unflatten(0, (num, length))
        wide = G[:, :end].unflatten(1, (num, length)).permute(1, 2, 0)
        for rows in slices(length, _lane_rows(U, width)):
            yield tall[:, rows], wide[:, rows]
    if end < len(U):
        yield U[None, end:], G[:, end:].T[None]


class Scratch:
    """Room for a block of products, written again for every block of a pass.

    Args:
        U: What the pass goes over.
        width: Numbers that are worked on for each row, as for ``blocks``.
        num_columns: Columns of the products.
        dtype: Their precision.
    """

    def __init__(
        self, U: Tensor, width: int, num_columns: int, dtype: torch.dtype
    ) -> None:
        num_rows = min(_num_lanes(U) * _lane_rows(U, width), len(U))
        self._room = U.new_empty(num_rows, num_columns, dtype=dtype)

    def beside(self, block: Tensor) -> Tensor:
        """Room for the products of a block (T, n, K), shape (T, n, columns)."""
        num, length, _ = block.shape
        return self._room[: num * length].unflatten(0, (num, length))


def add_products_(U: Tensor, G: Tensor, X: Tensor, *, centered: bool) -> None:
    """U ← U + Gᵀ X in place for samples (B, D) and X (B, K)."""
    X = X.to(U.dtype)
    as_they_are = not centered and G.dtype == U.dtype
    if as_they_are and _adds_in_place(U, len(X)):
        U.addmm_(G.T, X)
        return
    width = U.shape[1] if as_they_are else U.shape[1] + len(X)
    scratch = Scratch(U, width, U.shape[1], U.dtype)
    for block, samples in blocks(U, G, width):
        product = scratch.beside(block)
        H = to_be_multiplied(samples, U.dtype, centered)
        torch.bmm(H, for_each_lane(X, block), out=product)
        block.add_(product)


def to_be_multiplied(samples: Tensor, dtype: torch.dtype, centered: bool) -> Tensor:
    """A block of samples (T, n, B) in the precision to compute in, maybe centred."""
    samples = samples.to(dtype)
    return samples - samples.mean(dim=-1, keepdim=True) if centered else samples


def for_each_lane(small: Tensor, block: Tensor) -> Tensor:
    """A small matrix for every lane of a block, without copies."""
    return small.expand(len(block), -1, -1)


def _num_lanes(U: Tensor) -> int:
    return torch.get_num_threads() if U.device.type == "cpu" else 1


def _lane_rows(U: Tensor, width: int) -> int:
    return -(-block_rows(width) // _num_lanes(U))


def _adds_in_place(U: Tensor, num_samples: int) -> bool:
    """Whether a kernel adds a product to U itself without loss.

    On a CPU, rows that do not begin at multiples of 32 bytes take it twice the time of
    a product that is written elsewhere first, unless the product itself takes longer.
    """
    aligned = U.shape[1] * U.itemsize % ALIGNED_BYTES == 0
    return U.device.type != "cpu" or aligned or num_samples >= U.shape[1]
