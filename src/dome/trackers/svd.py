"""Rank-K incremental singular value decomposition of the averaged centred covariance.

Brand, "Fast low-rank modifications of the thin singular value decomposition" (2006).
Shapes: G (B, D) samples, H = G − mean, U (D, K) basis, λ (K,) eigenvalues. The update
keeps the leading K left singular vectors of

    M = [ U diag(√(w λ)),  Hᵀ √a ]

with w and a B the weights of the past and of the newest batch: the best rank-K
approximation of the averaged covariance, given the last one. In the orthonormal
coordinates [U, Z], Z spanning what H has outside U, M is a small matrix, so that U is
overwritten in place by U P + Hᵀ N. Cost 8 D B K + 2 D B² flops, and 2 D K² now and
then (see tall.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

from dome.numerics.linalg import Products
from dome.numerics.shard import Shard
from dome.trackers.basis import Basis
from dome.trackers.intake import Intake
from dome.trackers.protocol import Update

ROWS_AT_ONCE = 512  # H Hᵀ of more samples would cost more than the update itself
# Share of the longest direction of a batch below which a direction is rounding.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-13}


class IncrementalSVD:
    """Best rank-K update at every batch: sorted eigenvalues, no arbitrary directions.

    The rank grows by B − 1 a batch until it is K; columns not reached yet are zero and
    remove nothing. Batches of more than 512 (or 2 K) samples are folded in by parts of
    that size, each truncated to rank K; smaller ones are exact.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        forget: None averages all batches; a number in (0, 1) is the weight of the
            newest.
        oversample: Keep this many directions more than are removed.
        dtype: Storage of the basis: float32, float64, or bfloat16 with float32
            arithmetic.
        device: Where the basis lives.
        generator: Unused directions are never drawn; accepted so that trackers agree.
        shard: The rows of U, and columns of samples, that are held here, if other
            workers hold the others; all workers must update together.
        factored: Keep U as a product with a small matrix where that saves time. Reading
            ``basis`` then makes a copy; if it is read at every step, choose False.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        *,
        forget: float | None = None,
        oversample: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        shard: Shard | None = None,
        factored: bool = True,
    ) -> None:
        self._intake = Intake(dim, rank, forget, shard)
        self._tall = Basis(
            dim, rank, oversample, dtype, device, generator, shard, factored=factored
        )
        self._values = torch.zeros(self._tall.width, dtype=torch.float64, device=device)
        self._doubt = 0.0  # bound on what rounding did to UᵀU = I since it was mended
        self.last_update: Update | None = None

    @torch.no_grad()
    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        if not self._intake.admits(grads):
            return
        self._tall.check_orthogonality(self._intake.num_updates)
        parts = grads.split(max(ROWS_AT_ONCE, 2 * self._tall.width))
        if len(parts) > 1:
            self._update_by_parts(grads, scale, len(parts))
            return
        seen = self._tall.see(grads, scale, pairwise=False)
        if not seen.is_finite():
            self._intake.skip("a sample is not finite")
            return
        past, newest = self._intake.weights()
        self._intake.num_updates += 1
        self._values *= past
        if seen.is_constant(grads.dtype):
            self.last_update = self._tall.update_of(seen)
            return
        self._fold(grads, scale, seen, newest / len(grads))

    def _update_by_parts(self, grads: Tensor, scale: float, num_parts: int) -> None:
        """The same for a large batch: one part of its centred rows after the other."""
        mean = grads.mean(dim=0)
        (bad,) = self._tall.total(mean.isfinite().logical_not().sum().double())
        if bad > 0:
            self._intake.skip("a sample is not finite")
            return
        past, newest = self._intake.weights()
        self._intake.num_updates += 1
        self._values *= past
        for part in grads.tensor_split(num_parts):
            # Rows are centred on the whole batch; the part's own mean then is variance
            # too, which the mirrored rows below keep: [h; −h]/√2 has mean zero.
            rows = (part - mean) * 0.5**0.5
            both = torch.cat([rows, -rows])
            seen = self._tall.see(both, scale, pairwise=False)
            self._fold(both, scale, seen, newest / len(grads))
        seen = self._tall.see(grads, scale, pairwise=False)
        self.last_update = self._tall.update_of(seen)

    def _fold(self, G: Tensor, scale: float, seen: Products, a: float) -> None:
        """U, λ ← leading part of U diag(λ) Uᵀ + a Hᵀ H."""
        width, noise = self._tall.width, NOISE[self._tall.compute_dtype]
        correction, gram = self._tall.outside(G, seen.V, scale)
        V = seen.V + correction
        gram -= correction @ correction.T
        # Directions Z = (H − V Uᵀ)ᵀ Q θ^(−1/2) of what the batch has outside the basis.
        theta, Q = torch.linalg.eigh(gram)
        theta, Q = theta[1:], Q[:, 1:]  # a centred batch has B − 1 directions
        length = seen.energy + len(G) * seen.mu2
        eps = torch.finfo(self._tall.compute_dtype).eps
        keep = (theta > noise * theta[-1]) & (theta > (32 * eps) ** 2 * length)
        theta, Q = theta[keep], Q[:, keep]
        values, X = _leading_left(self._values, a**0.5 * V, (a * theta).sqrt(), Q)
        known = values[:width] > 1e-12 * values[0]  # the rounding of eigh
        self._values = torch.where(known, values[:width], 0.0)
        X = X[:, :width] * known
        M = (Q / theta.sqrt()) @ X[width:]
        P = X[:width] - V.T @ M
        self._tall.recombine_(P, G, scale * M, seen)
        mended = self._mend(X[width:], M, theta, length, int(known.sum()))
        full = replace(seen, V=V, K=V @ V.T + gram)
        measured = self._tall.coordinates_of(G, scale) if mended else None
        self.last_update = self._tall.update_of(full, P, M, measured)

    def _mend(
        self, X: Tensor, M: Tensor, theta: Tensor, length: Tensor, num_columns: int
    ) -> bool:
        """Make U orthonormal again once rounding may have cost it more than allowed."""
        if len(theta) == 0:
            return False
        eps = torch.finfo(self._tall.compute_dtype).eps
        # Z is orthonormal up to the rounding of its Gram matrix over θ, and Hᵀ M
        # cancels against U Vᵀ M: both matter where a batch has directions of very
        # unequal length.
        uneven = (X.square() * (theta[-1] / theta)[:, None]).sum(dim=0).max()
        cancelled = length.sqrt() * M.norm(dim=0).max()
        self._doubt += eps * float(10 * uneven + cancelled)
        if self._doubt <= 16 * eps:
            return False
        self._tall.orthonormalize_(self._intake.num_updates, num_columns=num_columns)
        self._doubt = 0.0
        return True

    @property
    def basis(self) -> Tensor:
        """U: orthonormal columns, then zeros, shape (D, K); clone it to keep it."""
        return self._tall.leading()

    @property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the averaged covariance, largest first, shape (K,)."""
        return self._values[: self._tall.rank].clone()

    @property
    def effective_rank(self) -> float:
        """How many directions the samples have determined so far."""
        return float((self._values > 0).sum())

    @property
    def num_skipped(self) -> int:
        """Batches left out: not finite, or of one sample."""
        return self._intake.num_skipped

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""
        return self._tall.orthogonality_error

    @torch.no_grad()
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g − strength · U Uᵀ g for a gradient of shape (D,)."""
        return self._tall.project_out(gradient, strength)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit, as tensors."""
        own = {
            "values": self._values,
            "doubt": torch.tensor(self._doubt, dtype=torch.float64),
        }
        return self._tall.state_dict() | self._intake.state_dict() | own

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""
        self._tall.load_state_dict(state)
        self._intake.load_state_dict(state)
        self._values = state["values"].to(self._values, copy=True)
        self._doubt = float(state["doubt"])
        self.last_update = None


def _leading_left(
    past: Tensor, inside: Tensor, lengths: Tensor, Q: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared singular values and left vectors of M in coordinates [U, Z], sorted."""
    top = torch.cat([torch.diag(past.sqrt()), inside.T], dim=1)
    bottom = torch.cat([top.new_zeros(len(lengths), len(past)), (Q * lengths).T], dim=1)
    T = torch.cat([top, bottom])
    values, X = torch.linalg.eigh(T @ T.T)
    return values.flip(0), X.flip(1)
