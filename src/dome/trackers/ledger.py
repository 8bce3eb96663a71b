"""What an update did to a basis, and when that has to be made orthonormal again.

Shapes: U (D, K) the basis, G (B, D) samples, H the same centred.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dome.numerics.factored import Factored
from dome.numerics.products import Products
from dome.numerics.together import Steps
from dome.trackers.protocol import Update

CHECK_EVERY = 100  # updates between two measurements of |UᵀU − I|, a hundredth of them
CHECK_EVERY_16_BIT = 10


class Ledger:
    """Keeps a basis orthonormal, and remembers the newest update.

    Args:
        U: The basis.
        seed: Of the random directions that fill up what samples leave open.
    """

    def __init__(self, U: Factored, seed: int) -> None:
        self._U, self._seed = U, seed
        sixteen = U.dtype.itemsize < torch.float32.itemsize
        self._every = CHECK_EVERY_16_BIT if sixteen else CHECK_EVERY
        self._error: float | Tensor = 0.0
        self._newest: Update | Callable[[], Update] | None = None

    @property
    def orthogonality_error(self) -> float:
        """Largest entry of |UᵀU − I| when it was last measured."""
        self._error = float(self._error)  # the device is asked for it once
        return self._error

    @property
    def newest(self) -> Update | None:
        """What the newest update saw; None before the first."""
        if callable(self._newest):
            self._newest = self._newest()
        return self._newest

    def forget(self) -> None:
        """Forget the newest update: the basis has changed in another way."""
        self._newest = None

    def note(
        self,
        seen: Products,
        P: Tensor,
        M: Tensor,
        coordinates: Tensor,
        rank: Tensor,
    ) -> None:
        """Remember U ← U P + Hᵀ M; its record is computed once somebody asks.

        Args:
            seen: What the samples had in common with the old U.
            P: Shape (K, K).
            M: Shape (B, K).
            coordinates: Samples in the directions that are removed, shape (B, n).
            rank: The effective rank, a scalar.
        """

        def update() -> Update:
            # Rows of directions that were not there yet are zero and do not count.
            squares = (P + seen.V.T @ M).square().sum(dim=1)
            cosines = squares.sum() / (squares > 0).sum().clamp(min=1)
            return Update(
                captured=coordinates.square().sum(dim=1),
                total=seen.sample_norms_squared,
                drift=(1 - cosines).clamp(min=0.0).sqrt(),
                mean_captured=coordinates.mean(dim=0).square().sum(),
                mean_total=seen.mu2,
                effective_rank=rank,
                orthogonality_error=(
                    self._error if isinstance(self._error, Tensor) else None
                ),
            )

        self._newest = update

    def note_no_change(
        self, seen: Products, chosen: Tensor | None, rank: Tensor
    ) -> None:
        """Remember a batch that did not turn U, of which U ``chosen`` is removed."""
        P = torch.eye(seen.V.shape[1], dtype=seen.V.dtype, device=seen.V.device)
        old = seen.V + seen.m
        old = old if chosen is None else old @ chosen
        self.note(seen, P, torch.zeros_like(seen.V), old, rank)

    def error(self, num_updates: int) -> Steps[Tensor]:
        """|UᵀU − I| of the columns that are there, now and then; else −1."""
        if num_updates == 0 or num_updates % self._every:
            # Not torch.tensor(): a number that is copied to a device waits for it.
            return torch.full((), -1.0, dtype=torch.float64, device=self._U.device)
        C: Tensor = yield from self._U.gram()
        # Columns that the data has not reached yet are zero.
        return (C - torch.diag((C.diagonal() > 0).to(C.dtype))).abs().max()

    def is_lost(self, error: float) -> bool:
        """Whether a measured error is more than rounding; it is remembered."""
        if error >= 0:
            self._error = error
        return error > self._U.orthogonality_limit

    def repair(
        self,
        num_updates: int,
        fill: Tensor,
        num_filled: int,
        num_columns: int | None = None,
        *,
        seed: int | None = None,
    ) -> Steps[None]:
        """Make U orthonormal again, with random columns where samples left it open."""
        # Seeded by the update's number, so that a resumed run draws the same ones.
        seed = (self._seed if seed is None else seed) + num_updates
        self._error = yield from self._U.orthonormalize_(
            seed, fill, num_filled, num_columns
        )

    def state_dict(self) -> dict[str, Tensor]:
        """What the upkeep of U depends on."""
        error = torch.as_tensor(self._error, dtype=torch.float64, device="cpu")
        return {"seed": torch.tensor(self._seed), "orthogonality_error": error}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._seed = int(state["seed"])
        self._error = float(state["orthogonality_error"])
        self._newest = None
