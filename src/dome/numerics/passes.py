"""Passes over the D rows of tall matrices: the only code that walks over them.

Shapes: S (D, K) tall, G (B, D) samples, small matrices P (K, K), X (B, K) in float64.
Rows are visited in blocks, so that beside S and G only one block exists at a time, and
sums are formed in float64 over short pieces, so that float32 products lose no more than
those of one piece do. How long blocks and pieces are is a device's habit.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dome.numerics import cpu
from dome.numerics.cpu import slices

# An accelerator wants few large products, and has memory for a block of this size.
DEVICE_NUMBERS = 2**26
DEVICE_PIECE_ROWS = 65_536

# Prepares a block of samples (..., B) or (B, ...) for a product; ``dim`` has the B.
Prepare = Callable[[Tensor, int, torch.dtype], Tensor]


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """The precision products are formed in: float32 for the 16-bit storage formats."""
    return torch.float32 if storage.itemsize < torch.float32.itemsize else storage


def as_they_are(block: Tensor, dim: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    """A block of samples in the precision to compute in."""
    return block.to(dtype)


def block_rows(width: int, device: torch.device | None = None) -> int:
    """How many rows are worked on at a time that take ``width`` numbers each."""
    width = max(width, 1)
    if device is not None and device.type != "cpu":
        return max(DEVICE_NUMBERS // width, 1)
    # Whole pieces: what is left over would take a product of its own in every block.
    return cpu.PIECE_ROWS * max(cpu.BLOCK_NUMBERS // width // cpu.PIECE_ROWS, 1)


def row_blocks(S: Tensor, width: int) -> Iterator[slice]:
    """Slices that cover the rows of S, of which each takes ``width`` numbers."""
    return slices(len(S), block_rows(width, S.device))


def multiply(wide: Tensor, tall: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """wide · tall, summed over their D columns and rows in float64.

    Products are formed in ``dtype``, by default that of ``tall``, at least float32.
    """
    dtype = dtype or compute_dtype(tall.dtype)
    alone = len(wide) == 1 and tall.device.type == "cpu"
    kernel = cpu.weighted_rows if alone else sum_of_pieces
    total = tall.new_zeros(len(wide), tall.shape[1], dtype=torch.float64)
    for rows in _readable_blocks(dtype, tall, wide):
        total += kernel(wide[:, rows].to(dtype), tall[rows].to(dtype))
    return total


def sum_of_pieces(wide: Tensor, tall: Tensor) -> Tensor:
    """The same of matrices of one precision: short products in a batch, then summed."""
    on_cpu = tall.device.type == "cpu"
    height, (rows, columns) = wide.shape[0], tall.shape
    num, length = cpu.pieces(rows, cpu.PIECE_ROWS if on_cpu else DEVICE_PIECE_ROWS)
    end = num * length
    left = wide[:, :end].view(height, num, length).transpose(0, 1)
    right = tall[:end].view(num, length, columns)
    # Kernels like the larger side last: with 10 columns against 128 rows, the
    # transposed product takes a third of the time.
    last = columns > height
    products = torch.bmm(left, right) if last else torch.bmm(right.mT, left.mT).mT
    total = products.sum(dim=0, dtype=torch.float64)
    return total if end == rows else total + wide[:, end:] @ tall[end:]


def gram(S: Tensor) -> Tensor:
    """Sᵀ S of a tall matrix (D, K), summed in float64, shape (K, K)."""
    total = S.new_zeros(S.shape[1], S.shape[1], dtype=torch.float64)
    for rows in row_blocks(S, S.shape[1]):
        block = S[rows].to(compute_dtype(S.dtype))
        total += sum_of_pieces(block.T, block)
    return total


def squared_norms(G: Tensor) -> Tensor:
    """‖g_b‖² of the rows of a wide matrix (B, D), in float64, without a copy of it.

    Norms of short pieces, whose squares are added up: squaring every entry first would
    take as much memory again as the samples do.
    """
    num, length = cpu.pieces(G.shape[1], cpu.PIECE_ROWS)
    end = num * length
    norms = torch.linalg.vector_norm(G[:, :end].unflatten(1, (num, length)), dim=2)
    rest = torch.linalg.vector_norm(G[:, end:], dim=1, keepdim=True)
    return torch.cat([norms, rest], dim=1).to(torch.float64).square().sum(dim=1)


def subtract_combination(vector: Tensor, S: Tensor, c: Tensor) -> Tensor:
    """v − S c for a vector (D,) and coordinates (K,)."""
    dtype = compute_dtype(S.dtype)
    # Copied first, on all threads: a bag's kernel leaves the upper halves of vector
    # registers in use, and products would crawl until another kernel clears them.
    result, c = vector.clone(), c.to(dtype)
    by_pieces = S.device.type == "cpu" and vector.dtype == dtype
    for rows in _readable_blocks(dtype, S):
        block = S[rows].to(dtype)
        if by_pieces:
            cpu.subtract_(result[rows], block, c)
        else:
            result[rows].sub_(block @ c)
    return result


def recombine_(
    S: Tensor,
    P: Tensor | None,
    G: Tensor | None = None,
    X: Tensor | None = None,
    prepare: Prepare = as_they_are,
) -> None:
    """S ← S P + Gᵀ X in place, a block of rows at a time.

    Args:
        S: Tall matrix, shape (D, K).
        P: Shape (K, K); None leaves the columns as they are.
        G: Samples, shape (B, D); None for none of them.
        X: Shape (B, K).
        prepare: What is done to a block of samples first.
    """
    if P is None and G is None:
        return
    dtype, K = compute_dtype(S.dtype), S.shape[1]
    copied = prepare is not as_they_are or (G is not None and G.dtype != dtype)
    width = K + len(G) if G is not None and copied else K
    P = None if P is None else P.to(dtype)
    X = None if X is None else X.to(dtype)
    at_once = block_rows(width, S.device)
    # One room for all blocks: first touches of fresh memory cost as much as a product.
    room = S.new_empty(min(at_once, len(S)), K, dtype=dtype)
    for rows in slices(len(S), at_once):
        block = S[rows]
        new = room[: len(block)]
        if P is not None:
            torch.mm(block.to(dtype), P, out=new)
        if G is not None and X is not None:
            H = prepare(G[:, rows].T, -1, dtype)
            _ = torch.mm(H, X, out=new) if P is None else new.addmm_(H, X)
        _ = block.add_(new) if P is None else block.copy_(new)


def _readable_blocks(
    dtype: torch.dtype, tall: Tensor, wide: Tensor | None = None
) -> Iterator[slice]:
    """Blocks of rows to read: larger ones if nothing has to be converted."""
    num_wide = 0 if wide is None else len(wide)
    converted = wide is not None and wide.dtype != dtype
    if converted or tall.dtype != dtype or tall.device.type != "cpu":
        return row_blocks(tall, tall.shape[1] + num_wide)
    summands = max(cpu.SUMMANDS // max(tall.shape[1] * num_wide, 1), 1)
    return slices(len(tall), min(cpu.VIEW_ROWS, summands * cpu.PIECE_ROWS))
