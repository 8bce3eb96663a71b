"""Linear algebra of tall matrices and of the small ones that they come down to.

Shapes: S (D, K) tall, G (B, D) samples, C (..., K, K) Gram matrices. Tall matrices are
multiplied in their own precision, at least float32, a block of rows at a time, and the
blocks are summed in float64. Small matrices are float64 throughout.

Cholesky QR: if C = SᵀS = RᵀR, the columns of S R⁻¹ are orthonormal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of a block of rows. Blocks bound what float32 sums lose, and what converted
# copies take: 16 MB on a CPU. An accelerator wants few large products.
CPU_NUMBERS, DEVICE_NUMBERS = 2**22, 2**26
PIECE_ROWS = 2048  # of a product with a vector, on a CPU
DEPENDENT = 1e-6  # squared norm of what a unit column has of its own, at least

IsTrue = Callable[[Tensor], bool]  # what is to be believed of a condition, a scalar
# Small float64 sums over this process' rows -> the same over all rows.
Total = Callable[..., tuple[Tensor, ...]]


def alone(*sums: Tensor) -> tuple[Tensor, ...]:
    """The sums of a process that holds all rows: what they are."""
    return sums


def as_it_is(rows: Tensor) -> Tensor:
    """The rows of a process that holds all of them: what they are."""
    return rows


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of D rows, in order; perhaps none of them.

    Attributes:
        dim: D.
        ranges: The rows held, from first to last.
        total: Adds up small tensors over all workers; the same result on each.
        collect: Brings the rows (n, ...) of all workers together, (D, ...).
    """

    dim: int
    ranges: tuple[slice, ...]
    total: Total = alone
    collect: Callable[[Tensor], Tensor] = as_it_is

    @staticmethod
    def whole(dim: int) -> "Shard":
        """All D rows in one process."""
        return Shard(dim, (slice(0, dim),))

    @property
    def num_rows(self) -> int:
        """How many rows are held."""
        return sum(part.stop - part.start for part in self.ranges)

    def held_of(self, whole: Tensor) -> Tensor:
        """Of all rows (D, ...), those held here, (n, ...)."""
        if len(self.ranges) == 1:
            return whole[self.ranges[0]]
        return torch.cat([whole[part] for part in self.ranges] or [whole[:0]])

    def meet(
        self, blocks: Iterable[slice]
    ) -> Iterator[tuple[slice, list[tuple[slice, slice]]]]:
        """Where blocks of the D rows, in order, meet those held here.

        Yields:
            Each block, with pairs: some of its rows, counted from its first, and where
            these lie among the rows held.
        """
        remaining, here = list(reversed(self.ranges)), 0
        for block in blocks:
            meetings = []
            while remaining and remaining[-1].start < block.stop:
                part = remaining.pop()
                stop = min(part.stop, block.stop)
                first, num = part.start - block.start, stop - part.start
                meetings.append((slice(first, first + num), slice(here, here + num)))
                here += num
                if stop < part.stop:
                    remaining.append(slice(stop, part.stop))
            yield block, meetings


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """The precision products are formed in: float32 for the 16-bit storage formats."""
    return torch.float32 if storage.itemsize < torch.float32.itemsize else storage


def block_rows(width: int, device: torch.device | None = None) -> int:
    """How many rows are worked on at a time that take ``width`` numbers each."""
    on_cpu = device is None or device.type == "cpu"
    return max((CPU_NUMBERS if on_cpu else DEVICE_NUMBERS) // max(width, 1), 1)


def product(wide: Tensor, tall: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """wide · tall over D columns and rows, summed in float64, shape (B, K).

    Products are formed in ``dtype``, by default that of ``tall``, at least float32.
    """
    dtype = dtype or compute_dtype(tall.dtype)
    total = tall.new_zeros(len(wide), tall.shape[1], dtype=torch.float64)
    num = block_rows(sum(total.shape), tall.device)
    times = _row_times if len(wide) == 1 and tall.device.type == "cpu" else torch.mm
    for left, right in zip(wide.split(num, dim=1), tall.split(num), strict=True):
        total += times(left.to(dtype), right.to(dtype))
    return total


def subtract_combination(vector: Tensor, S: Tensor, c: Tensor) -> Tensor:
    """v − S c for v (D,) and c (K,), all of one precision."""
    if S.device.type != "cpu":
        return torch.addmv(vector, S, c, alpha=-1)
    # Short products in a batch: a product with one long vector waits for memory on
    # every row, and takes three times as long where S is not in the cache.
    result = vector.clone()
    num = len(S) // PIECE_ROWS
    end = num * PIECE_ROWS
    if num:
        column = c.expand(num, 1, -1).mT  # the stride that has the quick kernel
        pieces = S[:end].unflatten(0, (num, PIECE_ROWS))
        result[:end].view(num, PIECE_ROWS, 1).baddbmm_(pieces, column, alpha=-1)
    result[end:].addmv_(S[end:], c, alpha=-1)
    return result


def _row_times(row: Tensor, tall: Tensor) -> Tensor:
    """w S for one row of weights (1, D): bags of an embedding, shape (1, K).

    Their kernel fetches rows ahead, which takes half of the time of a product.
    """
    index = torch.arange(len(tall))
    sums, *_ = torch.embedding_bag(
        tall, index, index[::PIECE_ROWS], per_sample_weights=row[0]
    )
    return sums.sum(dim=0, keepdim=True, dtype=torch.float64)


def gram(S: Tensor) -> Tensor:
    """SᵀS, float64, shape (K, K)."""
    return product(S.T, S)


def squared_norms(G: Tensor) -> Tensor:
    """‖g_b‖² of the rows of G, in float64, without a copy of it, shape (B,)."""
    total = G.new_zeros(len(G), dtype=torch.float64)
    for columns in G.split(block_rows(len(G), G.device), dim=1):
        norms = torch.linalg.vector_norm(columns, dim=1)
        total += norms.to(torch.float64).square()
    return total


def inverse_cholesky(C: Tensor) -> tuple[Tensor, Tensor]:
    """R⁻¹ of C = RᵀR (..., K, K), and what each column has of its own, (..., K).

    That is its squared norm after the earlier columns are taken out, as a share of its
    squared norm before: all zero where C has no Cholesky factor.
    """
    C, lengths = _with_unit_diagonal(C)
    L, info = torch.linalg.cholesky_ex(C)
    own = L.diagonal(dim1=-2, dim2=-1).square() * (info == 0).unsqueeze(-1)
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device).expand_as(C)
    inverse = torch.linalg.solve_triangular(L.mT, eye, upper=True)
    return inverse / lengths.unsqueeze(-1), own


def gram_schmidt(C: Tensor, floor: float, most: int) -> tuple[Tensor, Tensor]:
    """The same for a deficient C: columns that depend on earlier ones are passed over.

    Args:
        C: A Gram matrix, float64, shape (K, K).
        floor: What a column must have of its own to count as a direction.
        most: How many directions there can be; what follows the last is passed over.

    Returns:
        R⁻¹, zero in the columns passed over, and what each column has of its own, zero
        for those.
    """
    C, lengths = _with_unit_diagonal(C)
    inverse, own = torch.zeros_like(C), torch.zeros_like(lengths)
    found = torch.zeros_like(lengths[0])
    for j in range(len(C)):
        q = torch.zeros_like(lengths)
        q[j] = 1
        for _ in range(2):  # the second sweep removes what rounding left of the first
            q = q - inverse @ (inverse.T @ (C @ q))
        rest = (q @ C @ q).clamp(min=0.0)
        counts = (rest > floor) & (found < most)
        found = found + counts
        own[j] = torch.where(counts, rest, 0.0)
        inverse[:, j] = q * torch.where(counts, rest, torch.inf).rsqrt()
    return inverse / lengths[:, None], own


def sweep(C: Tensor, fill: Tensor) -> tuple[Tensor, Tensor]:
    """What makes columns with Gram matrix C orthonormal, those to fill behind others.

    Returns:
        P, shape (K, K), zero in columns that depend on others, and a mask of them.
    """
    order = torch.argsort(fill.to(torch.int8), stable=True)
    inverse, own = gram_schmidt(C[order][:, order], DEPENDENT, len(C))
    back = torch.argsort(order)
    return inverse[back][:, back], own[back] <= DEPENDENT


def upper_factor(
    core: Tensor, floor: float, most: int, is_true: IsTrue = bool
) -> tuple[Tensor, Tensor]:
    """R of core = Q R with positive diagonal, and its inverse.

    Args:
        core: Symmetric, float64, shape (K, K).
        floor: Squared share that a column must have of its own.
        most: How many directions there can be.
        is_true: What to believe of there being K.

    Returns:
        R, zero in the rows of columns that depend on earlier ones, and R⁻¹, zero in
        their columns.
    """
    _, R = torch.linalg.qr(core)
    R = R * R.diagonal().sign()[:, None]
    own = (R.diagonal() / torch.linalg.vector_norm(core, dim=0)).square()
    if most >= len(core) and is_true((own > floor).all()):
        eye = torch.eye(len(core), dtype=core.dtype, device=core.device)
        return R, torch.linalg.solve_triangular(R, eye, upper=True)
    # Through squares of the columns' lengths, which must not leave the range.
    size = torch.linalg.matrix_norm(core)
    size = torch.where(size > 0, size, 1.0)
    unit = core / size
    squared = unit @ unit
    inverse, _ = gram_schmidt(squared, floor, most)
    return inverse.T @ squared * size, inverse / size


def _with_unit_diagonal(C: Tensor) -> tuple[Tensor, Tensor]:
    """C for columns of length one, and the lengths (..., K); 1 for zero columns."""
    squares = C.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt()
    return C / lengths.unsqueeze(-1) / lengths.unsqueeze(-2), lengths
