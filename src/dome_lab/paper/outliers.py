"""SGD without the leading eigenspace of the Hessian: Bulk-SGD of Song et al. (2024).

"Does SGD really happen in tiny subspaces?" Shapes: V (D, K) the leading eigenvectors.
"""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dome.curvature import DegenerateMatrixError, Hessian, top_eigenpairs

CURVATURE_SAMPLES = 500  # training samples that curvature is computed over
CURVATURE_BATCH = 250
TOLERANCE = 1e-2  # relative, of an eigenvalue


class HessianOutliers:
    """Projects gradients away from the leading eigenspace of the Hessian.

    Args:
        model: The model that is trained.
        samples: Inputs and classes that the Hessian is computed over, the same always.
        rank: Number of directions K.
        every: Steps from one computation of the eigenspace to the next.
    """

    def __init__(
        self, model: nn.Module, samples: tuple[Tensor, Tensor], rank: int, every: int
    ) -> None:
        self._model, self._samples = model, samples
        self._rank, self._every = rank, every
        self._num_steps = 0
        self._vectors: Tensor | None = None

    def project_out(self, gradient: Tensor) -> Tensor:
        """g − V Vᵀ g, shape (D,); V is computed anew on every n-th call.

        A run that diverges keeps the last eigenspace there was.
        """
        if self._num_steps % self._every == 0:
            with suppress(DegenerateMatrixError):
                self._vectors = self._leading_vectors(gradient.dtype)
        self._num_steps += 1
        V = self._vectors
        return gradient if V is None else gradient - V @ (V.T @ gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """The eigenspace, if there is one, and how many steps there were."""
        state = {} if self._vectors is None else {"vectors": self._vectors}
        return state | {"num_steps": torch.tensor(self._num_steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the eigenspace of a state."""
        self._vectors = state.get("vectors")
        self._num_steps = int(state["num_steps"])

    def _leading_vectors(self, dtype: torch.dtype) -> Tensor:
        hessian = Hessian(
            self._model,
            cross_entropy,
            self._samples,
            batch_size=CURVATURE_BATCH,
            keep_graphs=True,
        )
        pairs = top_eigenpairs(hessian, self._rank, tolerance=TOLERANCE, dtype=dtype)
        return pairs.vectors
