"""A tall matrix that is overwritten by combinations of its columns.

Shapes: U (D, K), G (B, D) samples, H the same centred, P (K, K), M (B, K).

U is held as U = S Q, S (D, K) stored and Q (K, K) small. To write U ← U P + Hᵀ M out
takes 2 D K² flops to turn all the columns, for the sake of B samples. But

    U P + Hᵀ M  =  (S + Hᵀ M (Q P)⁻¹) Q P

so that S takes the samples in, 2 D B K flops, and Q ← Q P the turn. What rounding does
to S counts in U by as much as Q magnifies it; before that is too much, U is written
out, and Q = 1 again.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dome.numerics import lanes, linalg
from dome.numerics.linalg import Products, compute_dtype
from dome.numerics.pages import large_zeros
from dome.numerics.shard import Total, alone

LEAST_COLUMNS = 16
MOST_MAGNIFIED = 4.0  # two bits: by how much rounding in S may count in U
LONGEST = 1e6  # columns of S, where those of U are of length one
# Rows for each column from which Q⁻¹, about 2 K³ flops, costs little against U P.
TALL = 32


def is_written_out(dim: int, width: int, itemsize: int) -> bool:
    """Whether U (D, K) is one matrix after every update, and not kept as a product.

    16 bits have none to spare that rounding could be magnified by.
    """
    return dim < TALL * width or itemsize < torch.float32.itemsize


class Tall:
    """U in its storage format.

    Args:
        dim: Rows D, or those of them that are held here.
        width: Columns K.
        dtype: Storage format; products are formed in float32 at least.
        device: Where it lives.
        total: Adds up sums over the rows, where other workers hold the others.
        may_turn: Whether Q may be other than 1; always written out if not.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        total: Total = alone,
        *,
        may_turn: bool = True,
    ) -> None:
        self._total = total
        self._stored = large_zeros((dim, width), dtype, device)
        self._may_turn = may_turn
        self._Q: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Storage format."""
        return self._stored.dtype

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._stored.device

    @property
    def U(self) -> Tensor:  # noqa: N802 (the paper's symbol)
        """The matrix: a view valid until the next change, a copy unless Q = 1."""
        S, Q = self._stored, self._Q
        if Q is None:
            return S
        U = torch.empty_like(S)
        for rows in linalg.row_blocks(*S.shape):
            torch.mm(S[rows], Q.to(S.dtype), out=U[rows])
        return U

    def settled(self) -> Tensor:
        """The matrix as a view to write to, written out first."""
        if self._Q is not None:
            self._write_out(self._Q)
        return self._stored

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
            P: Shape (K, K); or (K,), a diagonal.
            G: Samples, shape (B, D).
            M: Shape (B, K), columns that sum to zero, so that Gᵀ M = Hᵀ M.
            centered: Centre the samples all the same: the sums are rounded, and a mean
                much longer than the deviations makes that visible.
        """
        Q = P
        if self._Q is not None:
            Q = self._Q * P if P.dim() == 1 else self._Q @ P
        inverse = self._usable_inverse(Q)
        if inverse is None:
            self._write_out(Q, G, M, centered)
            return
        if G is not None and M is not None:
            lanes.add_products_(self._stored, G, M @ inverse, centered=centered)
        self._Q = Q.diag() if Q.dim() == 1 else Q

    def products(self, G: Tensor, *, pairwise: bool) -> Products:
        """Products of samples (B, D) with each other and with U."""
        S, Q = self._stored, self._Q
        return linalg.products(S, G, pairwise=pairwise, mix=Q, total=self._total)

    def outside(self, G: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """What centred samples have outside U: see ``linalg.outside``."""
        S, Q = self._stored, self._Q
        return linalg.outside(S, G, V, scale, mix=Q, total=self._total)

    def gram(self) -> Tensor:
        """Uᵀ U, shape (K, K)."""
        C, Q = linalg.gram(self._stored), self._Q
        return self._total(C if Q is None else Q.T @ C @ Q)[0]

    def coordinates_of(self, G: Tensor) -> Tensor:
        """G U for samples (B, D): float64, shape (B, K)."""
        GU, Q = linalg.coefficients(self._stored, G), self._Q
        return self._total(GU if Q is None else GU @ Q)[0]

    def subtract(self, gradient: Tensor, c: Tensor) -> Tensor:
        """g − U c for a gradient of shape (D,) and coordinates (K,)."""
        turned = c if self._Q is None else self._Q @ c
        return linalg.subtract_combination(gradient, self._stored, turned)

    def state_dict(self) -> dict[str, Tensor]:
        """What U is made of: S, and Q unless it is 1."""
        no_mix = self._stored.new_empty(0, self._stored.shape[1], dtype=torch.float64)
        return {"basis": self._stored, "mix": no_mix if self._Q is None else self._Q}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a state of the same shape and storage back."""
        self._stored.copy_(state["basis"])
        mix = state["mix"]
        self._Q = mix.to(self.device, copy=True) if len(mix) else None

    def _usable_inverse(self, Q: Tensor) -> Tensor | None:
        """Q⁻¹, or None if U = S Q is to be written out."""
        if not self._may_turn:
            return None
        Q = Q.diag() if Q.dim() == 1 else Q
        inverse, info = torch.linalg.inv_ex(Q)
        # U has columns of length one, S = U Q⁻¹ those of Q⁻¹. Each of them is rounded
        # relative to its own length, so that only Q's turns magnify, not its scales.
        squared = inverse.square().sum(dim=0)
        magnified = (squared @ Q.square()).max()
        usable = (magnified <= MOST_MAGNIFIED**2) & (squared.max() <= LONGEST**2)
        return inverse if bool(usable & (info == 0)) else None

    def _write_out(
        self,
        P: Tensor,
        G: Tensor | None = None,
        M: Tensor | None = None,
        centered: bool = False,
    ) -> None:
        """S ← S P + Hᵀ M, a block of rows at a time."""
        dtype, width = compute_dtype(self.dtype), len(P)
        # Kernels take longer for a few columns than for sixteen.
        extra = (0, max(LEAST_COLUMNS - width, 0) if width > 1 else 0)
        P = pad((P.diag() if P.dim() == 1 else P).to(dtype), extra)
        M = None if M is None else pad(M.to(dtype), extra)
        num_columns = a_row = width + extra[1]
        if G is not None and (centered or G.dtype != dtype):
            a_row += len(G)  # a block of samples is copied, too
        scratch = lanes.Scratch(self._stored, a_row, num_columns, dtype)
        for old, samples in lanes.blocks(self._stored, G, a_row):
            new = scratch.beside(old)
            torch.bmm(old.to(dtype), lanes.for_each_lane(P, old), out=new)
            if M is not None:
                H = lanes.to_be_multiplied(samples, dtype, centered)
                new.baddbmm_(H, lanes.for_each_lane(M, old))
            old.copy_(new[..., :width])
        self._Q = None
