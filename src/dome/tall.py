"""A tall matrix that is overwritten by combinations of its columns, block by block.

Shapes: U (D, K), G (B, D) samples, H the same centred, P (K, K), M (B, K).

Where B is much smaller than K, most of an update's flops turn K columns for the sake of
a few samples. Then U ← U P + Hᵀ M may wait: the centred samples are kept as rows W, and

    U = [S, Wᵀ] Q        S (D, K) stored, W (P, D) waiting, Q (K + P, K)

is multiplied out when no more rows may wait. That divides 2 D K² flops by the number
of updates that waited together, for D P more numbers.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome import linalg
from dome.linalg import Products, compute_dtype
from dome.pages import large_zeros
from dome.shard import Total, alone

LEAST_COLUMNS = 16
TRIANGULAR_COLUMNS = 64  # from which the zero quarter of a triangular P is left out
WAITING_SHARE = 0.14  # of the K + B rows that U and the samples are; may wait


def waiting_rows(width: int, batch_size: int) -> int:
    """How many rows may wait beside K columns when B come at a time; maybe none."""
    return int(WAITING_SHARE * (width + batch_size)) // batch_size * batch_size


class Tall:
    """U in its storage format.

    Args:
        dim: Rows D, or those of them that are held here.
        width: Columns K.
        dtype: Storage format; products are formed in float32 at least.
        device: Where it lives.
        total: Adds up sums over the rows, where other workers hold the others.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        total: Total = alone,
    ) -> None:
        self._total = total
        self._stored = large_zeros((dim, width), dtype, device)
        self._room = self._stored.new_empty(0, dim, dtype=compute_dtype(dtype))
        self._num_waiting = 0
        self._Q = self._no_mix()

    @property
    def U(self) -> Tensor:  # noqa: N802 (the paper's symbol)
        """The matrix: a view valid until the next change, a copy if rows wait."""
        S, W = self._stored, self._waiting()
        if not len(W):
            return S
        Q = self._Q.to(W.dtype)
        U = torch.empty_like(S)
        for rows in linalg.row_blocks(*S.shape):
            U[rows] = S[rows] @ Q[: -len(W)] + W[:, rows].T @ Q[-len(W) :]
        return U

    def settled(self) -> Tensor:
        """The matrix as a view to write to; waiting rows are multiplied out first."""
        if self._num_waiting:
            eye = torch.eye(self._Q.shape[1], dtype=self._Q.dtype).to(self._Q.device)
            self.recombine_(eye)
        return self._stored

    def recombine_(
        self,
        P: Tensor,
        G: Tensor | None = None,
        M: Tensor | None = None,
        *,
        centered: bool = False,
        may_wait: bool = False,
    ) -> None:
        """U ← U P + Hᵀ M.

        Args:
            P: Shape (K, K), made use of if it is upper triangular; or (K,), a diagonal.
            G: Samples, shape (B, D).
            M: Shape (B, K), columns that sum to zero, so that Gᵀ M = Hᵀ M.
            centered: Centre the samples all the same: the sums are rounded, and a mean
                much longer than the deviations makes that visible.
            may_wait: Whether the samples may be kept instead, if they are few.
        """
        if self._num_waiting:
            Q = self._Q * P if P.dim() == 1 else self._Q @ P
            P, E = Q.split([self._stored.shape[1], self._num_waiting])
        else:
            E = P.new_empty(0, self._stored.shape[1])
        if may_wait and G is not None and M is not None and self._has_room(len(G)):
            self._wait(P, E, G, M)
        else:
            self._multiply_out(P, E, G, M, centered)

    def products(self, G: Tensor, *, pairwise: bool) -> Products:
        """Products of samples (B, D) with each other and with U."""
        waiting = self._waiting() if self._num_waiting else None
        seen = linalg.products(
            self._stored, G, pairwise=pairwise, waiting=waiting, total=self._total
        )
        if waiting is None:
            return seen
        return replace(seen, V=seen.V @ self._Q, m=seen.m @ self._Q)

    def coordinates(self, gradient: Tensor) -> Tensor:
        """Uᵀ g for a gradient of shape (D,): float64, (K,)."""
        c = linalg.coefficients(self._stored, gradient[None])[0]
        if not self._num_waiting:
            return self._total(c)[0]
        W = self._waiting()
        waiting = linalg.sum_of_products(gradient[None].to(W.dtype), W.T)[0]
        return self._total(torch.cat([c, waiting]))[0] @ self._Q

    def subtract(self, gradient: Tensor, c: Tensor) -> Tensor:
        """g − U c for a gradient of shape (D,) and coordinates (K,)."""
        S, W = self._stored, self._waiting()
        if not len(W):
            return linalg.subtract_combination(gradient, S, c)
        a, b = (self._Q @ c).split([S.shape[1], len(W)])
        return linalg.subtract_combination(gradient, S, a).sub_(b.to(W.dtype) @ W)

    def state_dict(self) -> dict[str, Tensor]:
        """What U is made of."""
        return {
            "basis": self._stored,
            "waiting": self._waiting(),
            "mix": self._Q,
            # When to multiply out decides how sums are rounded.
            "most_waiting": torch.tensor(len(self._room)),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a state of the same shape and storage back."""
        self._stored.copy_(state["basis"])
        W, most = state["waiting"], int(state["most_waiting"])
        if most != len(self._room):
            self._make_room(most)
        self._num_waiting = len(W)
        self._room[: len(W)] = W
        self._Q = state["mix"].to(self._Q, copy=True)

    def _waiting(self) -> Tensor:
        return self._room[: self._num_waiting]

    def _no_mix(self) -> Tensor:
        width = self._stored.shape[1]
        return self._stored.new_empty(0, width, dtype=torch.float64)

    def _make_room(self, num_rows: int) -> None:
        shape = (num_rows, len(self._stored))
        self._room = large_zeros(shape, self._room.dtype, self._room.device)

    def _has_room(self, num_rows: int) -> bool:
        """Whether so many rows may wait; makes the room when they are the first."""
        if self._stored.dtype != self._room.dtype:
            return False  # 16-bit storage is for saving memory
        if not len(self._room):
            most = waiting_rows(self._stored.shape[1], num_rows)
            self._make_room(most)
        return self._num_waiting + num_rows <= len(self._room)

    def _wait(self, P: Tensor, E: Tensor, G: Tensor, M: Tensor) -> None:
        P = P.diag() if P.dim() == 1 else P
        stop = self._num_waiting + len(G)
        torch.sub(G, G.mean(dim=0), out=self._room[self._num_waiting : stop])
        self._Q = torch.cat([P, E, M])
        self._num_waiting = stop

    def _multiply_out(
        self,
        P: Tensor,
        E: Tensor,
        G: Tensor | None,
        M: Tensor | None,
        centered: bool,
    ) -> None:
        """S ← S P + Wᵀ E + Hᵀ M, a block of rows at a time."""
        dtype, W = self._room.dtype, self._waiting()
        width = len(P)
        # Kernels take longer for a few columns than for sixteen.
        extra = (0, max(LEAST_COLUMNS - width, 0) if width > 1 else 0)
        P = P.to(dtype)
        product = _Product(P if P.dim() == 1 else pad(P, extra))
        E = pad(E.to(dtype), extra)
        M = None if M is None else pad(M.to(dtype), extra)
        a_row = width + extra[1]
        num_rows = min(linalg.block_rows(a_row), len(self._stored))
        scratch = self._room.new_zeros(num_rows, a_row)
        if G is not None and (centered or G.dtype != dtype):
            a_row += len(G)  # a block of samples is copied, too
        for rows in linalg.row_blocks(len(self._stored), a_row):
            old = self._stored[rows]
            new = scratch[: len(old)]
            product.write(old.to(dtype), new)
            if len(W):
                new.addmm_(W[:, rows].T, E)
            if G is not None and M is not None:
                block = G[:, rows].to(dtype)
                block = block - block.mean(dim=0) if centered else block
                new.addmm_(block.T, M)
            old.copy_(new[:, :width])
        self._num_waiting, self._Q = 0, self._no_mix()


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
            torch.mul(U, self._P, out=out[:, : len(self._P)])
        elif self._half:
            torch.mm(U[:, : self._half], self._upper, out=out)
            out[:, self._half :].addmm_(U[:, self._half :], self._corner)
        else:
            torch.mm(U, self._P, out=out)
