"""A tall matrix that is overwritten by combinations of its columns, without a copy.

Shapes: U (D, K), G (B, D) samples, H the same centred, P (K, K), M (B, K).

The storage has one block of rows more than U. An update writes every block of the new U
into the block that is free, next to where the old one lies, and leaves the old one's
place free for the next: U moves by one block, forth and back. What is written is never
read again in the same pass, so the product needs no room of its own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dome import linalg
from dome.linalg import compute_dtype

TRIANGULAR_COLUMNS = 64  # from which the zero quarter of a triangular P is left out


class Tall:
    """U in its storage format.

    Args:
        dim: Rows D.
        width: Columns K.
        dtype: Storage format; products are formed in float32 at least.
        device: Where it lives.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        self._block = min(linalg.BLOCK_ROWS, dim)
        self._storage = torch.zeros(
            dim + self._block, width, dtype=dtype, device=device
        )
        self._dim = dim
        self.is_low = True

    @property
    def U(self) -> Tensor:  # noqa: N802 (the paper's symbol)
        """The matrix, a view that is valid until the next ``recombine_``."""
        start = 0 if self.is_low else self._block
        return self._storage[start : start + self._dim]

    def recombine_(
        self,
        P: Tensor,
        G: Tensor | None = None,
        M: Tensor | None = None,
        *,
        centered: bool = False,
    ) -> None:
        """U ← U P + Hᵀ M.

        Args:
            P: Shape (K, K), made use of if it is upper triangular; or (K,), a diagonal.
            G: Samples, shape (B, D).
            M: Shape (B, K), columns that sum to zero, so that Gᵀ M = Hᵀ M.
            centered: Centre the samples all the same: the sums are rounded, and a mean
                much longer than the deviations makes that visible.
        """
        dtype = compute_dtype(self._storage.dtype)
        product = _Product(P.to(dtype))
        M = None if M is None else M.to(dtype)
        for rows, old, new in self._blocks():
            result = new if new.dtype == dtype else torch.empty_like(new, dtype=dtype)
            product.write(old.to(dtype), result)
            if G is not None and M is not None:
                block = G[:, rows].to(dtype)
                block = block - block.mean(dim=0) if centered else block
                result.addmm_(block.T, M)
            if result is not new:
                new.copy_(result)
        self.is_low = not self.is_low

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, where they lie and where they go, in an order that keeps them apart."""
        shift = self._block if self.is_low else -self._block
        source = 0 if self.is_low else self._block
        starts = range(0, self._dim, self._block)
        for start in reversed(starts) if self.is_low else starts:
            stop = min(start + self._block, self._dim)
            old = self._storage[source + start : source + stop]
            new = self._storage[source + start + shift : source + stop + shift]
            yield slice(start, stop), old, new


class _Product:
    """U P for many U, for a full, an upper triangular or a diagonal P."""

    def __init__(self, P: Tensor) -> None:
        self._P, self._half = P, 0
        if P.dim() == 2 and len(P) >= TRIANGULAR_COLUMNS:
            half = len(P) // 2
            if not bool(P[half:, :half].any()):
                self._half = half
                self._upper = P[:half].contiguous()
                self._corner = P[half:, half:].contiguous()

    def write(self, U: Tensor, out: Tensor) -> None:
        """Write U P into ``out``, which does not overlap U."""
        if self._P.dim() == 1:
            torch.mul(U, self._P, out=out)
        elif self._half:
            torch.mm(U[:, : self._half], self._upper, out=out)
            out[:, self._half :].addmm_(U[:, self._half :], self._corner)
        else:
            torch.mm(U, self._P, out=out)
