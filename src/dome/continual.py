"""Elastic weight consolidation: old tasks hold the parameters that mattered to them.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (2017).
Shapes: G (B, D) per-sample gradients, θ (D,) parameters, F (D,) Fisher diagonals. After
tasks 1..T the penalty is

    λ/2 Σ_t γ^(T−t) Σ_j F_tj (θ_j − θ*_tj)²

A sum of parabolas is one parabola, F (θ − a)², and a constant, so that memory does not
grow with the number of tasks.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from dome import state as states
from dome.filter import GradientFilter
from dome.parameters import Layout
from dome.samples import per_sample_gradients
from dome.torch_private import own_arithmetic

Loss = Callable[[Tensor, Tensor], Tensor]


class EWC:
    """Keeps a model near what earlier tasks need.

    Add ``penalty()`` to the loss; or pass the object as ``after`` to ``dome.attach``,
    which adds the penalty's gradient behind the filter. At the end of a task call
    ``consolidate``.

    Args:
        model: The model that is trained; it is neither wrapped nor changed.
        strength: λ, the weight of the penalty.
        decay: γ in (0, 1], what an older task's Fisher is multiplied by when a new one
            comes; 1 keeps all alike, less is online EWC (Schwarz et al. 2018).
    """

    def __init__(
        self, model: nn.Module, strength: float, *, decay: float = 1.0
    ) -> None:
        if not 0 <= strength < float("inf"):
            raise ValueError(f"strength must be a number of at least 0, got {strength}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {decay}")
        self.strength, self.decay = strength, decay
        self._model, self._layout = model, Layout(model)
        dim, dtype, device = self._layout.dim, self._layout.dtype, self._layout.device
        self._fisher = torch.zeros(dim, dtype=dtype, device=device)
        self._anchor = torch.zeros(dim, dtype=dtype, device=device)
        self._constant = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tasks = 0

    @property
    def fisher(self) -> Tensor:
        """Σ γ^(T−t) F_t, shape (D,)."""
        return self._fisher

    @property
    def anchor(self) -> Tensor:
        """Where the penalty is least, shape (D,)."""
        return self._anchor

    @property
    def num_tasks(self) -> int:
        """Tasks consolidated so far."""
        return self._num_tasks

    def consolidate(
        self,
        loss_fn: Loss,
        batches: Iterable[tuple[Tensor, Tensor]],
        *,
        grad_filter: GradientFilter | None = None,
        labels: str = "data",
        generator: torch.Generator | None = None,
    ) -> None:
        """End a task: measure its Fisher diagonal here, and hold on to this place.

            F_j = mean over samples of g_ij²

        The model must treat samples independently: batch norm in training mode does
        not.

        Args:
            loss_fn: Maps a batch of predictions and targets to a scalar mean.
            batches: Samples (x, y) of the task; some hundreds will do.
            grad_filter: Take g − U Uᵀ g with the basis of this filter instead of g.
            labels: "data" takes the targets as they are (the empirical Fisher), "model"
                draws them from the model's own softmax (the Fisher itself).
            generator: Draws the labels of "model".
        """
        if labels not in ("data", "model"):
            raise ValueError(f"labels must be 'data' or 'model', got {labels!r}")
        fisher, number = torch.zeros_like(self._fisher), 0
        for x, y in batches:
            targets = y if labels == "data" else self._drawn(x, generator)
            grads = per_sample_gradients(self._model, loss_fn, x, targets)
            if grad_filter is not None:
                grads = grad_filter.project_out(grads)
            fisher += grads.square().sum(dim=0)
            number += len(grads)
        if number == 0:
            raise ValueError("no samples to measure the Fisher diagonal with")
        if not fisher.isfinite().all():
            raise ValueError(
                "the Fisher diagonal is not finite: has training diverged?"
            )
        self._add(fisher / number, self._parameters().detach())

    @own_arithmetic
    def _add(self, fisher: Tensor, place: Tensor) -> None:
        """Γ F (θ − a)² + f (θ − p)² = (Γ F + f) (θ − a')² + constant."""
        old = self.decay * self._fisher
        total = old + fisher
        # Where no task has an interest, any anchor will do: the newest place.
        weight = torch.where(total > 0, fisher / total, 1.0)
        apart = (place - self._anchor).double().square()
        self._constant = self.decay * self._constant
        self._constant += (old.double() * weight.double() * apart).sum()
        self._anchor = torch.lerp(self._anchor, place, weight)
        self._fisher = total
        self._num_tasks += 1

    @own_arithmetic
    def _drawn(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        chances = self._model(x).softmax(dim=1)
        return torch.multinomial(chances, 1, generator=generator).squeeze(1)

    def penalty(self) -> Tensor:
        """The penalty at the model's parameters, differentiable; 0 before a task."""
        apart = self._parameters() - self._anchor
        parabola = (self._fisher * apart.square()).sum()
        return self.strength / 2 * (parabola + self._constant.to(parabola.dtype))

    @own_arithmetic
    def gradient(self) -> Tensor:
        """Gradient of the penalty, λ F (θ − a), shape (D,)."""
        return self.strength * self._fisher * (self._parameters() - self._anchor)

    def __call__(self, gradient: Tensor) -> Tensor:
        """A gradient (D,) with that of the penalty added, for ``after``."""
        return gradient + self.gradient().to(gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on, as tensors."""
        return states.shapes_of(self._layout) | {
            "fisher": self._fisher.clone(),
            "anchor": self._anchor.clone(),
            "constant": self._constant.clone(),
            "num_tasks": torch.tensor(self._num_tasks),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; one of another model is refused."""
        states.check_model(self._layout, state)
        own = self.state_dict()
        for name in ("fisher", "anchor", "constant"):
            there = state.get(name)
            if there is None or there.shape != own[name].shape:
                raise ValueError(f"the state of an EWC has no {name!r} of this model")
            if not there.isfinite().all() or (name == "fisher" and (there < 0).any()):
                raise ValueError(
                    f"{name!r} in the state of an EWC is not finite, or negative: the "
                    f"file is damaged; go back to an older one"
                )
        num_tasks = states.count_in(state, "num_tasks")
        self._fisher = state["fisher"].to(self._fisher, copy=True)
        self._anchor = state["anchor"].to(self._anchor, copy=True)
        self._constant = state["constant"].to(self._constant, copy=True)
        self._num_tasks = num_tasks

    def _parameters(self) -> Tensor:
        return torch.cat([p.flatten() for p in self._layout.parameters])
