"""The paper's recipe, written out: Opacus' hooks, then QR of the d x k matrix.

Algorithms 1 and 2 of the DOME paper with the tools it names. Shapes: G (B, D)
samples, U (D, K). Nothing is shared with the rest of the library: this is what it is
measured against, and what it must agree with.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MISSING = "opacus is missing, so the paper's recipe is left out: pip install opacus"


class PaperRecipe:
    """Algorithm 1 up to the optimizer. Call ``filter_`` after ``backward()``.

    Args:
        model: Gets Opacus' hooks; run ``self.model`` instead of it. Activations in
            place become ordinary ones, as the hooks forbid them.
        rank: Number of directions K.
        generator: Source of the initial basis.
    """

    def __init__(
        self, model: nn.Module, rank: int, generator: torch.Generator | None = None
    ) -> None:
        for module in model.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment] # a flag, no module
        self.model = grad_sample_module()(model)
        self._params = [p for p in model.parameters() if p.requires_grad]
        like = self._params[0]
        shape = (sum(p.numel() for p in self._params), rank)
        start = torch.randn(shape, generator=generator, dtype=like.dtype)
        self.basis: Tensor = torch.linalg.qr(start.to(like.device))[0]
        self._eigenvalues = torch.ones(rank, dtype=like.dtype, device=like.device)
        self._t = 0

    @torch.no_grad()
    def filter_(self) -> None:
        """Turn the basis towards the samples and filter ``.grad`` in place."""
        samples = [p.grad_sample.flatten(1) for p in self._params]  # type: ignore[attr-defined] # hung there by Opacus
        self._update(torch.cat(samples, dim=1))
        for p in self._params:
            p.grad_sample = None  # type: ignore[attr-defined] # as above
        grads = [p.grad for p in self._params if p.grad is not None]
        g, U = torch.cat([grad.flatten() for grad in grads]), self.basis
        filtered = g - U @ (U.T @ g)
        parts = filtered.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def _update(self, G: Tensor) -> None:
        """Algorithm 2."""
        self._t += 1
        t, B, U, lam = self._t, len(G), self.basis, self._eigenvalues
        H = G - G.mean(dim=0)
        V = H @ U
        W = H.T @ V / B
        Y = W if t == 1 else (t - 1) / t * (U * lam) + W / t
        self.basis, _ = torch.linalg.qr(Y)
        self._eigenvalues = torch.linalg.vector_norm(Y, dim=0)


@contextmanager
def quiet_hooks() -> Iterator[None]:
    """No warning that the input needs no gradient: it does not, as in any training."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def grad_sample_module() -> Callable[[nn.Module], Any]:
    """Opacus' wrapper; ``ModuleNotFoundError`` without Opacus."""
    from opacus import GradSampleModule

    return GradSampleModule
