"""Algebra of tall matrices: everything that walks over the D rows of a basis.

Shapes: U (D, K) tall, G (B, D) samples, small matrices P (K, K) and M (B, K) in
    float64.
Every function visits the rows in blocks, so that beside U and G only one block exists
at a time, and sums over blocks in float64, so that float32 products lose no more than
the products of one block do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.numerics.shard import Total, alone
from dome.numerics.vectors import (
    PIECE_ROWS,
    subtract_products_,
    weighted_rows,
    whole_pieces,
)

# What is converted or written at a time: beside U and the samples, only so much exists.
# So many rows, and more if they are short: calls on few numbers are mostly overhead.
BLOCK_ROWS = 4096
BLOCK_NUMBERS = 400_000
# What is read at a time where it needs no conversion: only its products take room.
VIEW_ROWS = 131072
# ‖μ‖² over the mean of ‖h_b‖² from which samples are centred before anything else.
LONG_MEAN = 4.0
# Number of samples from which half of the off-diagonal products is worth saving.
SPLIT_ROWS = 64
# Numbers in the products of pieces, before these are added up.
SUMMANDS = 4_000_000


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """The precision products are formed in: float32 for the 16-bit storage formats."""
    return torch.float32 if storage.itemsize < torch.float32.itemsize else storage


def block_rows(width: int) -> int:
    """How many rows are worked on at a time that take ``width`` numbers each."""
    return max(BLOCK_ROWS, BLOCK_NUMBERS // max(width, 1))


def row_blocks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows, of ``width`` numbers each."""
    return slices(num_rows, block_rows(width))


def slices(num_rows: int, size: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows, at most ``size`` each."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _readable_blocks(U: Tensor, *others: Tensor) -> Iterator[slice]:
    """Blocks of U's rows to read: larger ones if nothing has to be converted."""
    dtype = compute_dtype(U.dtype)
    as_they_are = all(t.dtype == dtype for t in (U, *others))
    if as_they_are:
        return slices(len(U), VIEW_ROWS)
    return row_blocks(len(U), U.shape[1] + sum(t.shape[0] for t in others))


def sum_of_products(A: Tensor, C: Tensor) -> Tensor:
    """A C for wide A (M, D) and tall C (D, N), summed in float64, shape (M, N).

    A batch of products of short pieces, whose results are added up: pieces run on
    several threads, where a product with a thin A or a single vector runs on one.
    """
    num, length = whole_pieces(C.shape[0])
    end = num * length
    wide = A[:, :end].unflatten(1, (num, length)).transpose(0, 1)
    tall = C[:end].unflatten(0, (num, length))
    # Kernels like the larger of M and N last: with 10 columns against 128 rows, the
    # transposed product takes a third of the time.
    last = C.shape[1] > A.shape[0]
    products = torch.bmm(wide, tall) if last else torch.bmm(tall.mT, wide.mT).mT
    total = products.sum(dim=0, dtype=torch.float64)
    return total if end == C.shape[0] else total + A[:, end:] @ C[end:]


def largest_angle(V: Tensor, W: Tensor) -> Tensor:
    """Largest principal angle between two subspaces, in radians.

        θ = arcsin ‖(I − V Vᵀ) W‖₂

    Args:
        V: Orthonormal basis of the first subspace, shape (D, K).
        W: Orthonormal basis of the second subspace, shape (D, K).

    Returns:
        A scalar in [0, π/2].

    Example:
        >>> e = torch.eye(3)
        >>> round(float(largest_angle(e[:, :1], e[:, 1:2])), 4)
        1.5708
    """
    # The sine form keeps full precision near θ = 0, where arccos(σ) loses half of it.
    residual = W - V @ (V.T @ W)
    return torch.linalg.matrix_norm(residual, ord=2).clamp(max=1.0).asin()


def gram(U: Tensor) -> Tensor:
    """Uᵀ U of a tall matrix (D, K), summed in float64, shape (K, K)."""
    total = U.new_zeros(U.shape[1], U.shape[1], dtype=torch.float64)
    for rows in row_blocks(*U.shape):
        block = U[rows].to(compute_dtype(U.dtype))
        total += sum_of_products(block.T, block)
    return total


def coefficients(U: Tensor, samples: Tensor) -> Tensor:
    """G U, the coordinates of samples (B, D) in a basis (D, K): float64, (B, K)."""
    dtype = compute_dtype(U.dtype)
    alone = len(samples) == 1 and U.device.type == "cpu"
    multiply = weighted_rows if alone else sum_of_products
    total = None
    for rows in _readable_blocks(U, samples):
        part = multiply(samples[:, rows].to(dtype), U[rows].to(dtype))
        total = part if total is None else total.add_(part)
    if total is None:
        return U.new_zeros(len(samples), U.shape[1], dtype=torch.float64)
    return total


def subtract_combination(gradient: Tensor, U: Tensor, c: Tensor) -> Tensor:
    """g − U c for a gradient of shape (D,) and coordinates (K,)."""
    dtype = compute_dtype(U.dtype)
    # Copied first, on all threads: a bag's kernel leaves the upper halves of vector
    # registers in use, and products would crawl until another kernel clears them.
    result, c = gradient.clone(), c.to(dtype)
    by_pieces = U.device.type == "cpu" and gradient.dtype == dtype
    for rows in _readable_blocks(U):
        block = U[rows].to(dtype)
        if by_pieces:
            subtract_products_(result[rows], block, c)
        else:
            result[rows].sub_(block @ c)
    return result


@dataclass(frozen=True, slots=True)
class Products:
    """What a batch of samples G = H + 1 μᵀ has in common with itself and with a basis.

    Everything an update needs to know of D-dimensional things, in numbers that do not
    depend on D, in float64.

    Attributes:
        V: H U, centred samples in the basis, shape (B, K).
        m: Uᵀ μ, the mean in the basis, shape (K,).
        K: H Hᵀ, shape (B, B), or only its diagonal, shape (B,), if not asked for.
        Hmu: H μ, shape (B,).
        mu2: ‖μ‖², a scalar.
    """

    V: Tensor
    m: Tensor
    K: Tensor
    Hmu: Tensor
    mu2: Tensor

    @property
    def sample_norms_squared(self) -> Tensor:
        """‖g_b‖² of every sample, shape (B,)."""
        diagonal = self.K.diagonal() if self.K.dim() == 2 else self.K
        return diagonal + 2 * self.Hmu + self.mu2

    @property
    def energy(self) -> Tensor:
        """‖H‖²_F, the total variance in the batch times B."""
        return self.K.trace() if self.K.dim() == 2 else self.K.sum()

    def mean_is_long(self, ratio: float) -> bool:
        """Whether ‖μ‖² is at least ``ratio`` times the mean of ‖h_b‖²."""
        return bool(len(self.V) * self.mu2 >= ratio * self.energy)

    def is_constant(self, dtype: torch.dtype) -> bool:
        """Whether samples of this precision differ by no more than its rounding."""
        nothing = bool(self.energy == 0)
        return nothing or self.mean_is_long((4 * torch.finfo(dtype).eps) ** -2)

    def is_finite(self) -> bool:
        """Whether every sample was: one infinite or missing value shows in all sums."""
        return bool((self.V.sum() + self.energy + self.mu2).isfinite())

    def scaled(self, scale: float) -> "Products":
        """The same for ``scale`` times the samples."""
        return Products(
            V=scale * self.V,
            m=scale * self.m,
            K=scale**2 * self.K,
            Hmu=scale**2 * self.Hmu,
            mu2=scale**2 * self.mu2,
        )


def products(
    U: Tensor,
    G: Tensor,
    *,
    pairwise: bool,
    mix: Tensor | None = None,
    total: Total = alone,
) -> Products:
    """Products of samples with each other and with a basis.

    The finished products are centred, not the samples, which saves two passes over
    them. If the mean turns out to be long, that has cost digits: then it is done again
    on samples centred block by block.

    Args:
        U: Basis, shape (D, K).
        G: Samples, shape (B, D).
        pairwise: Whether to form H Hᵀ, which costs 2 D B² flops, or its diagonal alone.
        mix: Q (K, K), if the basis is U Q.
        total: Adds up sums over the rows of U, where other workers hold the others.
    """
    seen = _products_then_center(U, G, pairwise, mix, total)
    if seen.is_finite() and seen.mean_is_long(LONG_MEAN):
        return _center_then_products(U, G, pairwise, mix, total)
    return seen


def _products_then_center(
    U: Tensor, G: Tensor, pairwise: bool, mix: Tensor | None, total: Total
) -> Products:
    B, dtype = len(G), compute_dtype(U.dtype)
    GU = U.new_zeros(B, U.shape[1], dtype=torch.float64)
    inner = U.new_zeros((B, B) if pairwise else (B,), dtype=torch.float64)
    Gmu = torch.zeros_like(GU[:, 0])
    for rows in _readable_blocks(U, G):
        block = G[:, rows].to(dtype)
        GU += sum_of_products(block, U[rows].to(dtype))
        if pairwise:
            inner += _self_products(block)
        else:
            inner += squared_norms(block)
            Gmu += block @ block.mean(dim=0)
    GU, inner, Gmu = total(GU if mix is None else GU @ mix, inner, Gmu)
    if pairwise:
        Gmu = inner.mean(dim=1)
    mu2 = Gmu.mean()
    cross = Gmu[:, None] + Gmu if pairwise else 2 * Gmu
    return Products(
        V=GU - GU.mean(dim=0),
        m=GU.mean(dim=0),
        K=inner - cross + mu2,
        Hmu=Gmu - mu2,
        mu2=mu2,
    )


def squared_norms(block: Tensor) -> Tensor:
    """‖g_b‖² of the rows of a wide block (B, rows), in float64, without a copy of it.

    Norms of short pieces, whose squares are added up: squaring every entry first would
    take as much memory again as the samples do.
    """
    num, length = whole_pieces(block.shape[1])
    end = num * length
    pieces = block[:, :end].unflatten(1, (num, length))
    norms = torch.linalg.vector_norm(pieces, dim=2)
    rest = torch.linalg.vector_norm(block[:, end:], dim=1, keepdim=True)
    return torch.cat([norms, rest], dim=1).to(torch.float64).square().sum(dim=1)


def _self_products(block: Tensor) -> Tensor:
    """G Gᵀ of a wide block, three quarters of it computed, the rest by symmetry."""
    if len(block) < SPLIT_ROWS:
        return sum_of_products(block, block.T)
    B, half = len(block), len(block) // 2
    total = block.new_zeros(B, B, dtype=torch.float64)
    at_once = max(SUMMANDS // (B * B), 1) * PIECE_ROWS
    for columns in slices(block.shape[1], at_once):
        top, bottom = block[:half, columns], block[half:, columns]
        total[:half] += sum_of_products(top, block[:, columns].T)
        total[half:, half:] += sum_of_products(bottom, bottom.T)
    total[half:, :half] = total[:half, half:].T
    return total


def _center_then_products(
    U: Tensor, G: Tensor, pairwise: bool, mix: Tensor | None, total: Total
) -> Products:
    B, dtype = len(G), compute_dtype(U.dtype)
    coords = U.new_zeros(B + 1, U.shape[1], dtype=torch.float64)
    inner = U.new_zeros(B + 1, B + 1 if pairwise else 1, dtype=torch.float64)
    diagonal = U.new_zeros(B, dtype=torch.float64)
    for rows in row_blocks(len(U), B + coords.shape[1]):
        block = G[:, rows].to(dtype)
        mean = block.mean(dim=0, keepdim=True)
        block = torch.cat([block - mean, mean])
        coords += sum_of_products(block, U[rows].to(dtype))
        inner += block @ block[-inner.shape[1] :].T
        diagonal += squared_norms(block[:B])
    coords = coords if mix is None else coords @ mix
    coords, inner, diagonal = total(coords, inner, diagonal)
    # Rounding leaves a mean of the order of the precision; H has none.
    V = coords[:B] - coords[:B].mean(dim=0)
    return Products(
        V=V,
        m=coords[B],
        K=inner[:B, :B] if pairwise else diagonal,
        Hmu=inner[:B, -1],
        mu2=inner[B, -1],
    )


def recombine_(U: Tensor, P: Tensor) -> None:
    """U ← U P in place, a block of rows at a time."""
    dtype = compute_dtype(U.dtype)
    P = P.to(dtype)
    for rows in row_blocks(*U.shape):
        U[rows] = U[rows].to(dtype) @ P


def outside(
    U: Tensor,
    G: Tensor,
    V: Tensor,
    scale: float,
    *,
    mix: Tensor | None = None,
    total: Total = alone,
) -> tuple[Tensor, Tensor]:
    """What centred samples have outside a basis, formed explicitly, block by block.

        H⊥ = H − V Uᵀ,  returns  H⊥ U  and  H⊥ H⊥ᵀ

    The first is zero up to rounding and to the basis' own error, and corrects for both.
    Differences of the finished products, H Hᵀ − V Vᵀ, would have no correct digit left
    where the basis holds nearly all of H.

    Args:
        U: Basis, shape (D, K).
        G: Samples, shape (B, D); H is ``scale * G`` centred.
        V: H U, shape (B, K).
        scale: Factor on the samples.
        mix: Q (K, K), if the basis is U Q.
        total: Adds up sums over the rows of U, where other workers hold the others.
    """
    dtype = compute_dtype(U.dtype)
    correction = torch.zeros_like(V)
    inner = V.new_zeros(len(G), len(G))
    coords = ((V if mix is None else V @ mix.T) / scale).to(dtype)
    width = len(G) + U.shape[1]
    # One room for all blocks: first touches of fresh memory cost as much as a product.
    room = U.new_empty(len(G), min(block_rows(width), len(U)), dtype=dtype)
    for rows in row_blocks(len(U), width):
        basis, samples = U[rows].to(dtype), G[:, rows].to(dtype)
        block = room[:, : len(basis)]
        torch.sub(samples, samples.mean(dim=0), out=block)
        block.addmm_(coords, basis.T, alpha=-1)
        correction += block @ basis
        inner += block @ block.T
    correction = correction if mix is None else correction @ mix
    correction, inner = total(correction, inner)
    return correction * scale, inner * scale**2
