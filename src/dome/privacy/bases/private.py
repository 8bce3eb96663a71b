"""A basis from private samples, whose noise is paid for together with the gradient's.

Shapes: U (D, K), a second moment M (D, K + 1). Hardt and Price, "The noisy power
method" (2014), on the average of Algorithm 2.
"""

import torch
from torch import Tensor

from dome.privacy.bases.protocol import Release, Setting, another_basis

SEED = 0x646F6D65  # of the first basis
ORTHONORMAL = 1e-3  # what float32 and thousands of QR decompositions stay far below


class Private:
    """Noised power iteration on clipped private samples (Hardt and Price 2014).

    The step's second moment is released with noise, centred with its own noised sum,
    and folded into the average as in Algorithm 2: Y = (t−1)/t U Λ + W/t.

    Args:
        dim: Number of parameters D.
        rank: Number of directions K.
        update_every: Releases a second moment on every n-th step.
        forget: None averages all releases; a number in (0, 1) is the newest's weight.
        dtype: Of the basis.
        device: Where it lives.
    """

    filters_first = True

    def __init__(
        self,
        dim: int,
        rank: int,
        *,
        update_every: int = 1,
        forget: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self._update_every, self._forget = update_every, forget
        if not 1 <= rank <= dim:
            raise ValueError(
                f"rank must be between 1 and the number of parameters {dim}, got {rank}"
            )
        # No sample decides it, so anybody may know it.
        public = torch.Generator().manual_seed(SEED)
        start = torch.randn(dim, rank, dtype=torch.float64, generator=public)
        self._basis = torch.linalg.qr(start).Q.to(device, dtype)
        self._norms = torch.ones(rank, dtype=torch.float64, device=device)
        self._num_steps = self._num_updates = 0

    @classmethod
    def made(cls, given: Setting) -> "Private":
        """The basis of a setting."""
        return cls(
            given.layout.dim,
            given.rank,
            update_every=given.options.update_every,
            forget=given.options.forget,
            dtype=given.layout.dtype,
            device=given.layout.device,
        )

    @property
    def moment_basis(self) -> Tensor | None:
        """``start`` on every n-th step."""
        return None if self._num_steps % self._update_every else self._basis

    def prepare(self) -> None:
        """All it learns from is there already."""

    def directions(self) -> Tensor | None:
        """U of the releases so far; ``start`` before there are any."""
        return self._basis if self._num_updates else None

    @property
    def start(self) -> Tensor:
        """The basis that the next second moment is formed with."""
        return self._basis

    def learn(self, release: Release) -> None:
        """Turn the basis by a step's noised second moment, if it has released one."""
        self._num_steps += 1
        if release.moment is None:
            return
        U = self._basis.to(release.moment)
        A, s = release.moment[:, :-1], release.moment[:, -1]
        # s sᵀU holds the square of the noise of s, in expectation its variance times U.
        W = A - torch.outer(s, s @ U) + release.moment_std**2 * U
        newest = 1 / (self._num_updates + 1)
        if self._forget is not None and self._num_updates:
            newest = self._forget
        Y = (1 - newest) * U * self._norms + newest * W
        self._norms = torch.linalg.vector_norm(Y, dim=0)
        self._basis = torch.linalg.qr(Y).Q.to(self._basis)
        self._num_updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Basis, column norms and counters."""
        return {
            "basis": self._basis.clone(),
            "norms": self._norms.clone(),
            "num_steps": torch.tensor(self._num_steps),
            "num_updates": torch.tensor(self._num_updates),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state.

        The sensitivity of the next second moment needs orthonormal columns: a state
        without them is refused.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(another_basis())
        if state["basis"].shape != self._basis.shape:
            raise ValueError(another_basis())
        U = state["basis"].double()
        error = (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()
        if not error < ORTHONORMAL:
            raise ValueError(
                f"the checkpoint's basis has columns that are not orthonormal (off by "
                f"{error:.2g}), and what a sample moves would not be bounded: the file "
                f"is damaged"
            )
        self._basis = state["basis"].to(self._basis, copy=True)
        self._norms = state["norms"].to(self._norms, copy=True)
        self._num_steps = int(state["num_steps"])
        self._num_updates = int(state["num_updates"])
