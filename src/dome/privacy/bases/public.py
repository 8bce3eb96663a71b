"""A basis from public samples, which costs no privacy."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from dome.privacy.bases.protocol import Release, Setting, another_basis, load_tracker
from dome.samples import per_sample_gradients
from dome.trackers import Tracker

NUM_STEPS = "num_steps"
Loss = Callable[[Tensor, Tensor], Tensor]


class Public:
    """Directions of public samples, taken with the model as it is.

    Args:
        tracker: Follows their covariance.
        model: The model that is trained; its parameters have been released.
        batches: Public batches (x, y); started again when it ends.
        loss_fn: Maps predictions and targets to a scalar mean.
        update_every: Takes a public batch on every n-th step.
    """

    filters_first = True
    moment_basis = None

    def __init__(
        self,
        tracker: Tracker,
        model: nn.Module,
        batches: Iterable[tuple[Tensor, Tensor]],
        loss_fn: Loss,
        update_every: int = 1,
    ) -> None:
        self._tracker, self._model, self._loss_fn = tracker, model, loss_fn
        self._batches, self._update_every = batches, update_every
        self._running: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._num_steps = 0

    @classmethod
    def made(cls, given: Setting) -> "Public":
        """The basis of a setting that has public data, which ``attach`` checks."""
        return cls(
            given.tracker(),
            given.model,
            cast("Iterable[tuple[Tensor, Tensor]]", given.public),
            cast("Loss", given.loss_fn),
            given.options.update_every,
        )

    def prepare(self) -> None:
        """Turn the basis towards the next public batch."""
        if self._num_steps % self._update_every == 0:
            x, y = self._next()
            grads = per_sample_gradients(self._model, self._loss_fn, x, y)
            self._tracker.update(grads)
        self._num_steps += 1

    def _next(self) -> tuple[Tensor, Tensor]:
        for batch in self._running:
            return batch
        self._running = iter(self._batches)
        for batch in self._running:
            return batch
        raise ValueError("the loader of public data is empty, or can be read only once")

    def directions(self) -> Tensor | None:
        """U of the tracker."""
        return self._tracker.basis

    def learn(self, release: Release) -> None:
        """Releases teach it nothing: public samples are all it knows."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tracker's state."""
        number = {NUM_STEPS: torch.tensor(self._num_steps)}
        return self._tracker.state_dict() | number

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on; the public loader starts from its beginning."""
        if NUM_STEPS not in state:
            raise ValueError(another_basis())
        own = {name: value for name, value in state.items() if name != NUM_STEPS}
        load_tracker(self._tracker, own)
        self._num_steps = int(state[NUM_STEPS])
