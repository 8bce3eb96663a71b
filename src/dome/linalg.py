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

BLOCK_ROWS = (
    8192  # a block of U and of G stays in a CPU's cache for K, B up to a few 100
)


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """The precision products are formed in: float32 for the 16-bit storage formats."""
    return torch.float32 if storage.itemsize < torch.float32.itemsize else storage


def row_blocks(num_rows: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows, at most ``BLOCK_ROWS`` each."""
    for start in range(0, num_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, num_rows))


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
    for rows in row_blocks(U.shape[0]):
        block = U[rows].to(compute_dtype(U.dtype))
        total += block.T @ block
    return total


def coefficients(U: Tensor, samples: Tensor) -> Tensor:
    """G U, the coordinates of samples (B, D) in a basis (D, K): float64, (B, K)."""
    total = U.new_zeros(len(samples), U.shape[1], dtype=torch.float64)
    dtype = compute_dtype(U.dtype)
    for rows in row_blocks(U.shape[0]):
        total += samples[:, rows].to(dtype) @ U[rows].to(dtype)
    return total


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

    def is_constant(self, dtype: torch.dtype) -> bool:
        """Whether samples of this precision differ by no more than its rounding."""
        rounding = (4 * torch.finfo(dtype).eps) ** 2 * len(self.V) * self.mu2
        return bool(self.energy <= rounding)

    @property
    def energy(self) -> Tensor:
        """‖H‖²_F, the total variance in the batch times B."""
        return self.K.trace() if self.K.dim() == 2 else self.K.sum()

    def is_finite(self) -> bool:
        """Whether every sample was: one infinite or missing value shows in all sums."""
        return bool((self.V.sum() + self.energy + self.mu2).isfinite())


def products(U: Tensor, G: Tensor, scale: float, *, pairwise: bool) -> Products:
    """Products of the samples ``scale * G`` with each other and with a basis.

    Samples are centred block by block. Centring the finished Gram matrix instead would
    save a pass, and lose all digits when the mean is much longer than the deviations.

    Args:
        U: Basis, shape (D, K).
        G: Samples, shape (B, D).
        scale: Factor on the samples, applied to the small results only.
        pairwise: Whether to form H Hᵀ, which costs 2 D B² flops, or its diagonal alone.
    """
    B, dtype = len(G), compute_dtype(U.dtype)
    coords = U.new_zeros(B + 1, U.shape[1], dtype=torch.float64)
    last = B + 1 if pairwise else 1
    inner = U.new_zeros(B + 1, last, dtype=torch.float64)
    diagonal = U.new_zeros(B, dtype=torch.float64)
    for rows in row_blocks(U.shape[0]):
        block = G[:, rows].to(dtype)
        mean = block.mean(dim=0, keepdim=True)
        block = torch.cat([block - mean, mean])
        coords += block @ U[rows].to(dtype)
        inner += block @ block[-last:].T
        if not pairwise:
            diagonal += torch.linalg.vecdot(block[:B], block[:B])
    coords *= scale
    inner *= scale**2
    K = inner[:B, :B] if pairwise else diagonal * scale**2
    # Rounding leaves a mean of the order of the precision; H has none.
    V = coords[:B] - coords[:B].mean(dim=0)
    return Products(V=V, m=coords[B], K=K, Hmu=inner[:B, -1], mu2=inner[B, -1])


def recombine_(
    U: Tensor, P: Tensor, G: Tensor | None = None, M: Tensor | None = None
) -> None:
    """U ← U P + Hᵀ M in place, H being the samples G (B, D) centred, block by block.

    Gᵀ M would be the same, as the columns of M sum to zero; but their sum is rounded,
    and a mean much longer than the deviations would make that visible.
    """
    dtype = compute_dtype(U.dtype)
    P = P.to(dtype)
    M = None if M is None else M.to(dtype)
    for rows in row_blocks(U.shape[0]):
        block = U[rows].to(dtype) @ P
        if G is not None and M is not None:
            block.addmm_(_centered(G, rows, dtype).T, M)
        U[rows] = block


def _centered(G: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    block = G[:, rows].to(dtype)
    return block - block.mean(dim=0)


def outside(U: Tensor, G: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
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
    """
    dtype = compute_dtype(U.dtype)
    correction = torch.zeros_like(V)
    inner = V.new_zeros(len(G), len(G))
    coords = (V / scale).to(dtype)
    for rows in row_blocks(U.shape[0]):
        basis = U[rows].to(dtype)
        block = torch.addmm(_centered(G, rows, dtype), coords, basis.T, alpha=-1)
        correction += block @ basis
        inner += block @ block.T
    return correction * scale, inner * scale**2
