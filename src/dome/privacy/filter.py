"""The filter with a privacy guarantee: filter, clip, sum, noise, and count.

Shapes: G (B, D) samples, U (D, K) a basis that these samples have not turned, L the
expected batch size, C the clipping norm. A step releases

    (I − U Uᵀ) (Σ clip(g_i − U Uᵀ g_i, C) + σ₁ C z) / L

and with ``basis="private"`` a noised second moment as well. The batch size of a step
is used nowhere in it, nor any ``.grad`` that autograd made.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dome import state as states
from dome.hooking import Hooked
from dome.options import FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import Budget, PrivacyError, divided
from dome.privacy.bases import Basis, Release
from dome.privacy.parameters import ParameterGuard, check_parameters
from dome.privacy.refuse import check_precision, check_products
from dome.privacy.releases import (
    MOMENT_SENSITIVITY,
    Randomness,
    clipped_sum_,
    second_moment_,
    without_span_,
)
from dome.privacy.samples import PrivateSamples
from dome.privacy.sampling import PoissonLoader
from dome.torch_private import own_arithmetic
from dome.world import pass_through

BASIS, BUDGET, GUARD = "basis.", "budget.", "guard."


@dataclass(frozen=True, slots=True)
class PrivateStats:
    """What may be told of a private step: nothing in it comes from samples.

    Attributes:
        step: Steps that have been paid for.
        noise_multiplier: σ of each.
        sample_rate: Probability with which a sample is in a batch.
        expected_batch_size: L, what sums are divided by.
    """

    step: int
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float


class PrivateFilter(Hooked):
    """What ``dome.privacy.attach`` returns; see there.

    Train on the batches of ``loader()``, and ask ``epsilon()`` what it has cost so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        layout: Layout,
        basis: Basis,
        budget: Budget,
        options: FilterOptions,
        *,
        max_grad_norm: float,
        basis_share: float,
        randomness: Randomness,
        expected_batch_size: float | None,
        data: Dataset[Any] | DataLoader[Any] | None = None,
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._layout = model, optimizer, layout
        self._basis, self._budget, self._options = basis, budget, options
        self._max_norm, self._share = max_grad_norm, basis_share
        # Which samples are drawn must not shift the noise: seeded runs on data sets
        # that differ in one sample have the same.
        self._sampling, self._randomness = randomness.branch(), randomness
        self._expected, self._data = expected_batch_size, data
        self._parameters = ParameterGuard(model, layout)
        self._samples = PrivateSamples(model, layout, self._parameters, budget, options)
        self._batches = self._samples.batches
        self._loader: PoissonLoader | None = None

    def loader(
        self,
        dataset: Dataset[Any] | DataLoader[Any] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 (DataLoader names and checks them)
    ) -> PoissonLoader:
        """Poisson batches of a data set, the only ones that steps are taken with.

        Args:
            dataset: What is kept private; or a ``DataLoader`` of it, whose collation
                and workers are taken over, and whose batch size and order are not.
                The ``data`` of ``attach`` if not given.
            collate_fn: Makes a batch of samples, as in ``DataLoader``.
            **options: Those of ``DataLoader`` that do not choose samples.
        """
        dataset = self._data if dataset is None else dataset
        if dataset is None:
            raise PrivacyError(
                "no data set is known that is to be kept private: call "
                ".loader(dataset), or give data= to attach"
            )
        if isinstance(dataset, DataLoader):
            collate_fn = collate_fn or dataset.collate_fn
            options = {"num_workers": dataset.num_workers} | options
            dataset = dataset.dataset
        if self._loader is None:
            self._loader = PoissonLoader(
                dataset,
                self._budget.sample_rate,
                self._sampling,
                self._batches.draw,
                collate_fn,
                **options,
            )
        elif self._loader.dataset is not dataset:
            raise PrivacyError(
                "this filter already has a data set, and its epsilon is for that one: "
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

    @property
    def stats(self) -> PrivateStats:
        """What ``Recorder`` writes: numbers that cost no privacy."""
        return PrivateStats(
            self.num_steps,
            self.noise_multiplier,
            self._budget.sample_rate,
            self.expected_batch_size,
        )

    def epsilon(self, delta: float | None = None) -> float:
        """What all steps so far have cost, everything that they released included.

        A batch that was drawn and waits for its step is in it.

        Args:
            delta: At this δ; the ``target_delta`` of ``attach`` if not given.
        """
        self._check()
        return self._budget.epsilon(delta, int(self._batches.is_waiting))

    @contextmanager
    def public_changes(self) -> Iterator[None]:
        """Let parameters change inside, on your word that it costs no privacy.

        For what comes from public data or from parameters that were released: loading
        weights, training on public samples, averages of earlier parameters, bounds on
        weights. Nobody can check it.
        """
        self._batches.check_none_waits()
        with self._parameters.public_changes():
            yield
            self._batches.check_none_waits()

    def _check(self) -> None:
        """Refuse to go on with parameters that nobody has paid for."""
        if self.is_attached:
            check_parameters(self._optimizer, self._layout, self._model)
            self._parameters.check()

    def settle(self) -> None:
        """Take what the optimizer made of a private gradient; called after its step."""
        self._parameters.settle()

    def step(self) -> None:
        """Put a private gradient in the place of ``.grad``; count its cost first."""
        check_products(self._layout.device)
        check_precision(self._model)
        self._step()

    @own_arithmetic
    def _step(self) -> None:
        self._check()
        if self._loader is None:
            raise PrivacyError(
                "a step needs a Poisson batch: train on the batches of .loader(dataset)"
            )
        rows = self._samples.take()
        self._budget.spend()
        self._batches.done()
        self._basis.prepare()
        U = self._basis.directions()
        C, L = self._max_norm, self.expected_batch_size
        sigma, moment, std = self.noise_multiplier, None, 0.0
        V = self._basis.moment_basis
        if V is not None:
            sigma, sigma_basis = divided(self.noise_multiplier, self._share)
            std = sigma_basis * MOMENT_SENSITIVITY / L
            moment = self._noised(second_moment_(rows, V, C) / C**2 / L, std)
        if U is not None and self._basis.filters_first:
            without_span_(rows, U)
        release = self._noised(clipped_sum_(rows, C), sigma * C) / L
        release = release.to(self._layout.dtype)
        gradient = release
        if U is not None:
            gradient = release - U @ (U.T @ release)
        self._parameters.open()
        self._write_(pass_through(self._options.stages, gradient))
        self._basis.learn(Release(release, moment, std))

    def _noised(self, total: Tensor, std: float) -> Tensor:
        noise = self._randomness.gaussian(tuple(total.shape), std)
        return total + noise.to(total.device)

    def _write_(self, gradient: Tensor) -> None:
        """Give every parameter its part, also where this batch left none.

        Whether a parameter has a gradient may depend on the samples. Whether it is
        frozen does not: then it gets none, and no noise moves it.
        """
        sizes = [p.numel() for p in self._layout.parameters]
        pieces = gradient.split(sizes)
        for p, piece in zip(self._layout.parameters, pieces, strict=True):
            p.grad = None
            if p.requires_grad:
                p.grad = piece.view(p.shape).to(p.dtype).clone()

    def detach(self) -> None:
        """Remove every hook; from then on training is not private, nor counted."""
        self._samples.detach()
        super().detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Basis and cost so far; no randomness, so that no noise is used twice."""
        self._check()
        state = states.shapes_of(self._layout)
        state |= states.with_prefix(BASIS, self._basis.state_dict())
        spent = self._budget.state_dict(int(self._batches.is_waiting))
        state |= states.with_prefix(BUDGET, spent)
        state |= states.with_prefix(GUARD, self._parameters.state_dict())
        return state | states.stages(self._options.stages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, with what it has cost, and never with less.

        Load the model's state too, before or after, but before it is called.
        """
        states.check_model(self._layout, state)
        for name in (f"{BUDGET}history", f"{BUDGET}runs", f"{GUARD}values"):
            if name not in state:
                raise ValueError(
                    f"the state has no {name!r}: it was written by the first edition "
                    f"of dome, or is damaged. Start a run anew"
                )
        # The budget last: it gives nothing back that it has counted.
        states.load_together(
            [
                (self._basis, states.below_prefix(BASIS, state)),
                *states.stage_states(self._options.stages, state),
                (self._budget, states.below_prefix(BUDGET, state)),
            ]
        )
        self._parameters.load_state_dict(states.below_prefix(GUARD, state))
        for source in (self._randomness, self._sampling):
            source.go_on(self.num_steps)
        self._samples.discard()
