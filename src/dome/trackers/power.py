"""Streaming power method: Algorithm 2 (UpdateSub) of the DOME paper, to the letter.

Shapes: G (B, D) samples, H = G − mean, U (D, K) basis. Algorithm 2 computes

    V = H U,  W = Hᵀ V / B,  Y = W  or  (t−1)/t U Λ + W/t,  U, R = QR(Y),  λ = ‖Y₍ⱼ₎‖

and holds U, W, Y and Q, four tall matrices. Because UᵀU = I, the Gram matrix of Y is a
function of V and H Hᵀ alone; its Cholesky factor is R, its diagonal is λ², and U is
overwritten in place by Y R⁻¹. Cost 4 D B K + 2 D min(B², K² + B K) flops, and 2 D K²
now and then (see tall.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dome.numerics.linalg import Products
from dome.numerics.orthonormal import cholesky_in_order
from dome.numerics.shard import Shard
from dome.trackers.basis import Basis
from dome.trackers.intake import Intake
from dome.trackers.protocol import Update

INDEPENDENT = 0.05  # a column with less of its own (squared) costs more than a digit


def is_pairwise(width: int, num_samples: int) -> bool:
    """Whether an update of B samples and W columns forms H Hᵀ, 2 D B² flops.

    Without it Y is multiplied, and G for the record, which is twice the passes: up to
    twice the flops are the faster way.
    """
    return 2 * width * (width + num_samples) >= num_samples**2


class StreamingPower:
    """The paper's tracker: a power iteration on the average centred covariance.

    The first update has rank at most B − 1. Directions beyond that are arbitrary, as
    they are with any QR, and keep the weight that Algorithm 2 gives them;
    ``effective_rank`` says how much of the basis is still owed to them.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        forget: None averages all batches (the paper); a number in (0, 1) is the weight
            of the newest batch instead.
        oversample: Track this many directions more, and remove the leading K left
            singular vectors of Y.
        dtype: What the basis is stored in: float32, float64, or bfloat16 with float32
            arithmetic.
        device: Where the basis lives.
        generator: Source of the initial basis. Without one, a fixed seed is used.
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
        self._tall.start_random()
        width = self._tall.width
        self._norms = torch.ones(width, dtype=torch.float64, device=device)
        # NᵀN where U = (data) + A N: how much of each column is owed to arbitrary
        # directions A, those of the random start and those that a deficient QR made up.
        self._arbitrary = torch.eye(width, dtype=torch.float64, device=device)
        self._record: Update | Callable[[], Update] | None = None
        self._mean_coordinates: Tensor | None = None

    @torch.no_grad()
    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate.

        A batch with a value that is not finite, or of one sample, is left out and
        counted.
        """
        self._mean_coordinates = None
        if not self._intake.admits(grads):
            return
        pairwise = is_pairwise(self._tall.width, len(grads))
        self._tall.check_orthogonality(self._intake.num_updates)
        seen = self._tall.see(grads, scale, pairwise=pairwise)
        weights = self._weights(seen, grads.dtype)
        if weights is None:
            return
        step = self._step_from_products if pairwise else self._step_from_columns
        step(grads, scale, seen, *weights)

    def _weights(
        self, seen: Products, dtype: torch.dtype
    ) -> tuple[Tensor, float] | None:
        """s and a of Y = U diag(s) + a Hᵀ V; None if no direction turns."""
        if not seen.is_finite():
            self._intake.skip("a sample is not finite")
            return None
        past, newest = self._intake.weights()
        self._intake.num_updates += 1
        s = past * self._norms
        if seen.is_constant(dtype):
            self._norms = s  # W = 0
            self._record = self._tall.update_of(seen)
            return None
        return s, newest / len(seen.V)

    def prepare(self, num_samples: int) -> bool:
        """Whether a batch is large enough; U is mended first, where that is due.

        For ``update_from_action``: its samples meet U before it is called.
        """
        self._mean_coordinates = None
        if not self._intake.admits_number(num_samples):
            return False
        self._tall.check_orthogonality(self._intake.num_updates)
        return True

    @property
    def may_be_mended(self) -> bool:
        """Whether ``prepare`` may change U."""
        return self._tall.is_checked_before(self._intake.num_updates)

    @torch.no_grad()
    def update_from_action(
        self, seen: Products, action: Tensor, measure: Callable[[], Tensor]
    ) -> None:
        """The same update, where V = H U and Hᵀ V were formed elsewhere.

        Args:
            seen: What the samples have in common with each other and with U.
            action: Hᵀ V, the rows held here, shape (D, W).
            measure: Gives G U (B, W) with the updated basis.
        """
        weights = self._weights(seen, action.dtype)
        if weights is None:
            return
        s, a = weights
        self._tall.add_action_(s, a, action)

        def measure_matrix() -> Tensor:
            self._tall.write_out()  # samples meet U elsewhere, as one matrix
            return measure()

        self._end_of_columns(seen, s, a, measure_matrix)

    def _step_from_products(
        self, G: Tensor, scale: float, seen: Products, s: Tensor, a: float
    ) -> None:
        """R from V and H Hᵀ, then one pass that overwrites U."""
        V, K = seen.V, seen.K
        VV = V.T @ V
        C = torch.diag(s.square()) + a * (s[:, None] * VV + VV * s)
        C += a * a * (V.T @ K @ V)
        inverse, empty, shaky = self._factor(C, len(G))
        P, M = s[:, None] * inverse, a * (V @ inverse)
        self._tall.recombine_(P, G, scale * M, seen)
        if shaky:
            self._tall.orthonormalize_(self._intake.num_updates, empty)
            measured = self._tall.coordinates_of(G, scale)
            self._record = self._tall.update_of(seen, P, M, measured)
        else:
            # Small matrices are enough, and they are only multiplied if somebody asks.
            self._record = partial(self._tall.update_of, seen, P, M)
            self._mean_coordinates = seen.m @ P + seen.Hmu @ M
        self._account(P, empty)

    def _step_from_columns(
        self, G: Tensor, scale: float, seen: Products, s: Tensor, a: float
    ) -> None:
        """Y written over U, R from its own Gram matrix, then U = Y R⁻¹."""
        self._tall.recombine_(s, G, a * scale * seen.V, seen)
        measure = partial(self._tall.coordinates_of, G, scale)
        self._end_of_columns(seen, s, a, measure)

    def _end_of_columns(
        self, seen: Products, s: Tensor, a: float, measure: Callable[[], Tensor]
    ) -> None:
        """U = Y R⁻¹, where U holds Y already."""
        inverse, empty, shaky = self._factor(self._tall.gram(), len(seen.V))
        self._tall.recombine_(inverse)
        if shaky:
            self._tall.orthonormalize_(self._intake.num_updates, empty)
        P, M = s[:, None] * inverse, a * (seen.V @ inverse)
        self._record = self._tall.update_of(seen, P, M, measure())
        self._account(P, empty)

    def _factor(self, C: Tensor, num_samples: int) -> tuple[Tensor, Tensor, bool]:
        """R⁻¹ of Y from its Gram matrix; which columns Y leaves open; is it shaky."""
        norms = C.diagonal().clamp(min=0.0).sqrt()
        self._norms = norms
        safe = torch.where(norms > 0, norms, 1.0)
        # Without a past, Y has no more directions than a centred batch has.
        most = num_samples - 1 if self._intake.num_updates == 1 else None
        inverse, left = cholesky_in_order(
            C / safe[:, None] / safe, self._tall.floor, most
        )
        empty = left <= self._tall.floor
        R_inverse = inverse / safe[:, None]
        if self._tall.oversample:
            self._tall.select_leading(C, R_inverse)
        return R_inverse, empty, bool((left < INDEPENDENT).any())

    def _account(self, P: Tensor, empty: Tensor) -> None:
        owed = P.T @ self._arbitrary @ P
        owed[empty, :] = 0
        owed[:, empty] = 0
        self._arbitrary = owed + torch.diag(empty.to(owed.dtype))

    @property
    def last_update(self) -> Update | None:
        """What the newest update saw; None before the first."""
        if callable(self._record):
            self._record = self._record()
        return self._record

    @property
    def columns(self) -> Tensor:
        """All W tracked columns, shape (D, W); clone them to keep them."""
        return self._tall.U

    @property
    def basis(self) -> Tensor:
        """U, orthonormal columns, shape (D, K); clone it to keep it past an update."""
        return self._tall.leading()

    @property
    def eigenvalues(self) -> Tensor:
        """Column norms of Y (Algorithm 2's Λ), shape (K,); ones before any update."""
        return self._tall.leading_eigenvalues(self._norms)

    @property
    def effective_rank(self) -> float:
        """How many of the tracked directions are owed to samples and not to chance."""
        owed = float(self._arbitrary.trace().clamp(0.0, self._tall.width))
        return self._tall.width - owed

    @property
    def num_skipped(self) -> int:
        """Batches left out: not finite, or of one sample."""
        return self._intake.num_skipped

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""
        return self._tall.orthogonality_error

    @property
    def mean_coordinates(self) -> Tensor | None:
        """Uᵀ μ for the mean μ of the newest samples, (K,); None if it is not known."""
        return self._mean_coordinates

    @torch.no_grad()
    def project_out(
        self,
        gradient: Tensor,
        strength: float = 1.0,
        *,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        """g − strength · U Uᵀ g for a gradient of shape (D,).

        Args:
            gradient: g, shape (D,).
            strength: How much of it to remove, in [0, 1].
            coordinates: Uᵀ g where it is known, which saves a pass over U.
        """
        return self._tall.project_out(gradient, strength, coordinates)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit, as tensors."""
        own = {"norms": self._norms, "arbitrary": self._arbitrary}
        return self._tall.state_dict() | self._intake.state_dict() | own

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same dimension and rank."""
        self._tall.load_state_dict(state)
        self._intake.load_state_dict(state)
        self._norms = state["norms"].to(self._norms, copy=True)
        self._arbitrary = state["arbitrary"].to(self._arbitrary, copy=True)
        self._record = self._mean_coordinates = None
