"""What else could be done to a gradient: controls for what the filter does.

Each changes a gradient (D,) before it is compressed. The Hessian's outliers are those
of Bulk-SGD: Song et al. (2024), "Does SGD really happen in tiny subspaces?"

Shapes: G (B, D) one sample's gradient a row, g (D,) the batch gradient, U (D, K), V
(D, K) the leading eigenvectors of the Hessian.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import dome
from dome.curvature import DegenerateMatrixError, Hessian, top_eigenpairs
from dome.parameters import Layout
from dome.samples import source_for
from dome_lab.paper.device import FIRST_BASIS, generator
from dome_lab.paper.run import Run

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


Change = Callable[[Tensor], Tensor]
ADAM_BETA2, ADAM_EPSILON = 0.999, 1e-8  # torch's defaults


class RandomSpan:
    """Takes out K random directions, always the same: is any subspace as good?"""

    def __init__(self, _: nn.Module, layout: Layout, __: Optimizer, run: Run) -> None:
        noise = generator(run.seed, FIRST_BASIS)
        U = torch.randn(layout.dim, run.rank or 0, generator=noise)
        self._U = torch.linalg.qr(U).Q.to(layout.device)

    def __call__(self, gradient: Tensor) -> Tensor:
        """g − U Uᵀ g, shape (D,)."""
        U = self._U.to(gradient.dtype)
        return gradient - U @ (U.T @ gradient)


class ScaledSamples:
    """Sums up samples whose norms were changed: is it only that some are large?

    "normalised" gives every sample the mean norm, "clipped" shortens those above the
    median to it.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, _: Optimizer, run: Run
    ) -> None:
        self._source = source_for("per_sample", model, layout)
        self._scale = _SCALES[run.sample_norms or "normalised"]

    def __call__(self, gradient: Tensor) -> Tensor:
        """Σ cᵢ gᵢ, shape (D,), of the batch that was last seen."""
        G = self._source.take()
        if G is None:
            raise RuntimeError("there are no samples: call backward() before step()")
        norms = torch.linalg.vector_norm(G, dim=1)
        return (self._scale(norms) @ G).to(gradient.dtype)


class PreconditionedSpan:
    """Takes out the leading directions of what Adam makes of the gradients.

    With S = diag(√v̂ + ε), Adam's denominator so far:

        g − S U Uᵀ S⁻¹ g,   U tracked from the samples S⁻¹ gᵢ
    """

    def __init__(
        self, model: nn.Module, layout: Layout, optimizer: Optimizer, run: Run
    ) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._source = source_for("per_sample", model, layout)
        self._tracker = dome.StreamingPower(
            layout.dim,
            run.rank or 0,
            generator=generator(run.seed, FIRST_BASIS),
            device=layout.device,
            dtype=layout.dtype,
        )

    def __call__(self, gradient: Tensor) -> Tensor:
        """What is left of a gradient, shape (D,)."""
        G, S = self._source.take(), self._denominator(gradient)
        if G is not None:
            self._tracker.update(G / S, scale=len(G))
        return S * self._tracker.project_out(gradient / S)

    def state_dict(self) -> dict[str, Tensor]:
        """The tracker's state."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same run."""
        self._tracker.load_state_dict(state)

    def _denominator(self, gradient: Tensor) -> Tensor:
        """√v̂ + ε of this step, shape (D,): this gradient is already part of v̂."""
        states = [self._optimizer.state.get(p, {}) for p in self._layout.parameters]
        t, v = 1, torch.zeros_like(gradient)
        if all("exp_avg_sq" in state for state in states):
            t = 1 + int(states[0]["step"])
            v = torch.cat([state["exp_avg_sq"].flatten() for state in states])
        v = ADAM_BETA2 * v + (1 - ADAM_BETA2) * gradient.square()
        return (v / (1 - ADAM_BETA2**t)).sqrt() + ADAM_EPSILON


def control_of(
    model: nn.Module, layout: Layout, optimizer: Optimizer, run: Run
) -> Change | None:
    """The control that a run asks for; None if it asks for none."""
    if run.sample_norms is not None:
        return ScaledSamples(model, layout, optimizer, run)
    if run.removes == "random":
        return RandomSpan(model, layout, optimizer, run)
    if run.removes == "preconditioned":
        return PreconditionedSpan(model, layout, optimizer, run)
    return None


def _normalised(norms: Tensor) -> Tensor:
    """Factors (B,) that make all norms (B,) their mean; a sample of zero stays."""
    return torch.where(norms > 0, norms.mean() / norms, 1.0)


def _clipped(norms: Tensor) -> Tensor:
    """Factors (B,) that make no norm (B,) larger than their median."""
    return torch.where(norms > 0, norms.median() / norms, 1.0).clamp(max=1.0)


_SCALES = {"normalised": _normalised, "clipped": _clipped}
