"""The filter with a privacy guarantee: filter, clip, sum, noise, and count.

Shapes: G (B, D) samples, U (D, K) a basis that these samples have not turned, L the
expected batch size, C the clipping norm. A step releases

    (I − U Uᵀ) (Σ clip(g_i − U Uᵀ g_i, C) + σ₁ C z) / L

and with ``basis="private"`` a noised second moment beside it. The batch size of a step
is used nowhere in it, nor any ``.grad`` that autograd made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dome import state as states
from dome.filter import pass_through
from dome.hooking import Hooked
from dome.options import Downstream, FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import Budget, divided
from dome.privacy.bases import Basis, Private, Release
from dome.privacy.errors import PrivacyError
from dome.privacy.randomness import Randomness
from dome.privacy.refuse import check_parameters
from dome.privacy.releases import clipped_sum_, second_moment_, without_span_
from dome.samples import PerSample

if TYPE_CHECKING:
    from dome.privacy.sampling import PoissonLoader

BASIS, BUDGET = "basis.", "budget."
LOST = 1e-3  # of the samples' norms: more than rounding, less than any penalty


class PrivateFilter(Hooked):
    """What ``dome.privacy.attach`` returns; see there.

    Train on the batches of ``loader(dataset)``, and ask ``epsilon(delta)`` what it has
    cost so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        layout: Layout,
        basis: Basis,
        budget: Budget,
        *,
        max_grad_norm: float,
        basis_share: float,
        randomness: Randomness,
        expected_batch_size: float | None,
        loss_reduction: str,
        after: Downstream | Sequence[Downstream],
        batch_dim: int | None,
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._layout = model, optimizer, layout
        self._basis, self._budget = basis, budget
        self._max_norm, self._share = max_grad_norm, basis_share
        # Which samples are drawn must not shift the noise: seeded runs on data sets
        # that differ in one sample have the same.
        self._sampling, self._randomness = randomness.branch(), randomness
        self._expected = expected_batch_size
        self._options = FilterOptions(
            rank=1, loss_reduction=loss_reduction, after=after
        )
        self._source = PerSample(model, layout, batch_dim=batch_dim)
        self._loader: PoissonLoader | None = None

    def loader(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 (DataLoader names and checks them)
    ) -> "PoissonLoader":
        """Poisson batches of a data set, the only ones that steps are taken with.

        Args:
            dataset: What is kept private; or a ``DataLoader`` of it, whose collation
                and workers are taken over, and whose batch size and order are not.
            collate_fn: Makes a batch of samples, as in ``DataLoader``.
            **options: Those of ``DataLoader`` that do not choose samples.
        """
        from dome.privacy.sampling import PoissonLoader

        if isinstance(dataset, DataLoader):
            collate_fn = collate_fn or dataset.collate_fn
            options = {"num_workers": dataset.num_workers} | options
            dataset = dataset.dataset
        if self._loader is None:
            self._loader = PoissonLoader(
                dataset,
                self._budget.sample_rate,
                self._sampling,
                collate_fn,
                **options,
            )
        elif self._loader.dataset is not dataset:
            raise PrivacyError(
                "this filter already has a data set, and its epsilon is of that one: "
                "attach again for another"
            )
        return self._loader

    @property
    def expected_batch_size(self) -> float:
        """L, what sums are divided by, at every step."""
        if self._expected is None:
            if self._loader is None:
                raise PrivacyError(
                    "the expected batch size is not known yet: call .loader(dataset), "
                    "or give expected_batch_size to attach"
                )
            self._expected = self._budget.sample_rate * self._loader.num_samples
        return self._expected

    @property
    def noise_multiplier(self) -> float:
        """σ of a step, all that it releases taken together."""
        return self._budget.noise_multiplier

    @property
    def num_steps(self) -> int:
        """Steps that have been paid for."""
        return self._budget.num_steps

    def epsilon(self, delta: float) -> float:
        """What all steps so far have cost, everything that they released included."""
        return self._budget.epsilon(delta)

    @torch.no_grad()
    def step(self) -> None:
        """Put a private gradient in the place of ``.grad``; count its cost first."""
        check_parameters(self._optimizer, self._layout, self._model)
        rows = self._take()
        self._budget.spend()
        self._basis.prepare()
        U = self._basis.directions()
        asks = self._basis.wants_moment
        sigma, sigma_basis = self.noise_multiplier, 0.0
        if asks:
            sigma, sigma_basis = divided(self.noise_multiplier, self._share)
        std = sigma_basis * math.sqrt(2) / self.expected_batch_size
        moment = self._noised_moment(rows, std) if asks else None
        if U is not None and self._basis.filters_first:
            without_span_(rows, U)
        total = clipped_sum_(rows, self._max_norm).double()
        release = self._noised(total, sigma * self._max_norm) / self.expected_batch_size
        release = release.to(self._layout.dtype)
        gradient = release
        if U is not None:
            gradient = release - U @ (U.T @ release)
        self._write_(pass_through(self._options.stages, gradient))
        self._basis.learn(Release(release, moment, std))

    def _noised_moment(self, rows: Tensor, std: float) -> Tensor:
        """The second moment of this batch over C² L, with its noise."""
        U, C = cast("Private", self._basis).start, self._max_norm
        moment = second_moment_(rows, U, C).double()
        return self._noised(moment / C**2 / self.expected_batch_size, std)

    def _noised(self, total: Tensor, std: float) -> Tensor:
        noise = self._randomness.gaussian(tuple(total.shape), std)
        return total + noise.to(total.device)

    def _take(self) -> Tensor:
        """The samples (B, D) of this step, each the gradient of its own loss."""
        if self._loader is None:
            raise PrivacyError(
                "a step needs a Poisson batch: train on the batches of .loader(dataset)"
            )
        drawn = self._loader.take()
        passes, rows = self._source.rows.num_waiting, self._source.take()
        found = 0 if rows is None else len(rows)
        if found != drawn:
            raise PrivacyError(
                f"the batch has {drawn} samples, and backward() saw {found}: use the "
                f"whole batch once, as it comes from .loader(dataset), and nothing else"
            )
        if rows is None:
            return torch.zeros(
                (0, self._layout.dim),
                dtype=self._layout.dtype,
                device=self._layout.device,
            )
        if passes > 1 and self._options.loss_reduction == "mean":
            # Parts divide by their own sizes, so that one sample more would change how
            # much the others of its part weigh: clipping bounds no such change.
            raise PrivacyError(
                f"backward() was called {passes} times for one step: with parts, use a "
                f"loss that sums, and loss_reduction='sum'"
            )
        rows = rows.to(self._layout.dtype)
        self._check_nothing_else(rows)
        return rows.mul_(self._options.sample_scale(len(rows)))

    def _check_nothing_else(self, rows: Tensor) -> None:
        """Refuse a loss with terms that are no sample's, which would be lost."""
        total = rows.sum(dim=0)
        difference = torch.linalg.vector_norm(total - self._layout.gather())
        size = torch.linalg.vector_norm(rows, dim=1).sum()
        # A sample that is not finite makes this false, and is dealt with later.
        if difference > LOST * size:
            raise PrivacyError(
                "part of .grad is no sample's: a penalty in the loss, or a gradient "
                "that zero_grad() did not clear. Call zero_grad() before backward(), "
                "and use the optimizer's weight_decay instead of a penalty"
            )

    def _write_(self, gradient: Tensor) -> None:
        """Give every parameter its part, also where this batch left none.

        Whether a parameter has a gradient may depend on the samples.
        """
        sizes = [p.numel() for p in self._layout.parameters]
        pieces = gradient.split(sizes)
        for p, piece in zip(self._layout.parameters, pieces, strict=True):
            p.grad = piece.view(p.shape).to(p.dtype).clone()

    def detach(self) -> None:
        """Remove every hook; from then on training is not private."""
        self._source.detach()
        super().detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Basis and cost so far; no randomness, so that no noise is used twice."""
        state = states.shapes_of(self._layout)
        state |= states.with_prefix(BASIS, self._basis.state_dict())
        state |= states.with_prefix(BUDGET, self._budget.state_dict())
        return state | states.stages(self._options.stages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, with what it has cost."""
        states.check_model(self._layout, state)
        saved = states.below_prefix(BASIS, state)
        own = self._basis.state_dict()
        missing = sorted(own.keys() - saved.keys() - {"recent.0"})
        if missing or ("basis" in own and own["basis"].shape != saved["basis"].shape):
            raise ValueError(
                "the checkpoint has another basis: use the same basis, rank and tracker"
            )
        self._basis.load_state_dict(saved)
        self._budget.load_state_dict(states.below_prefix(BUDGET, state))
        states.load_stages(self._options.stages, state)
        self._source.discard()
