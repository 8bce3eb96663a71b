"""Poisson batches: every sample is in a batch with the same probability, by itself.

The accountants assume this, and nothing else will do: shuffled batches of fixed size
have another, larger epsilon. Opacus' collation gives empty batches their shape.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from opacus.data_loader import wrap_collate_with_empty
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as torch_collate

from dome.privacy.errors import PrivacyError
from dome.privacy.guards import BatchGuard, Marks, marks_of
from dome.privacy.randomness import Randomness


class PoissonSampler:
    """Lists of indices, one a batch.

    As Opacus' ``UniformWithReplacementSampler``, but drawn from the operating system's
    generator where no other is given; a torch generator takes 32 bits of its seed.

    Args:
        num_samples: Size of the data set.
        sample_rate: Probability that a sample is in a batch.
        randomness: Draws the decisions.
    """

    def __init__(
        self, num_samples: int, sample_rate: float, randomness: Randomness
    ) -> None:
        self._num_samples, self._sample_rate = num_samples, sample_rate
        self._randomness = randomness

    def __len__(self) -> int:
        # A rounding error must not take a batch from 1 / 0.2 of them.
        return int(1 / self._sample_rate + 1e-9)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            drawn = self._randomness.uniform(self._num_samples) < self._sample_rate
            yield drawn.nonzero().flatten().tolist()


class PoissonLoader:
    """Batches for private training; one pass has 1 / sample_rate of them.

    Every batch is shown to a guard before it is handed out, so that a step with other
    samples, or a batch without a step, is noticed; whatever number of iterators there
    are.

    Args:
        dataset: What is kept private; it has a length.
        sample_rate: Probability that a sample is in a batch.
        randomness: Draws the decisions.
        guard: Is shown every batch.
        collate_fn: Makes a batch of samples, as in ``DataLoader``.
        **options: Those of ``DataLoader`` that do not choose samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        randomness: Randomness,
        guard: BatchGuard,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 (DataLoader names and checks them)
    ) -> None:
        _check_options(dataset, options)
        self.dataset, self._guard = dataset, guard
        self._sampler = PoissonSampler(
            len(cast("Any", dataset)), sample_rate, randomness
        )
        collate = wrap_collate_with_empty(collate_fn=collate_fn or torch_collate)
        # An empty first batch has no other from which to take its structure.
        collate([dataset[0]])
        # The seed of workers; unlike torch's default it leaves the global generator be.
        seeds = torch.Generator()
        seeds.seed()
        self._loader = DataLoader(
            dataset,
            batch_sampler=cast("Any", self._sampler),
            collate_fn=_Marked(collate),
            generator=seeds,
            **options,
        )

    @property
    def num_samples(self) -> int:
        """Size of the data set."""
        return len(cast("Any", self.dataset))

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        for marks, batch in self._loader:
            self._guard.draw(marks, batch)
            yield batch


class _Marked:
    """A collation that says by what a batch is known again, in whatever process."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Marks, Any]:
        batch = self._collate(samples)
        return marks_of(len(samples), batch), batch


def _check_options(dataset: Dataset[Any], options: dict[str, Any]) -> None:
    choosing = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    named = sorted(choosing & options.keys())
    if named:
        raise PrivacyError(
            f"{named[0]} chooses samples, and the accountant assumes that sample_rate "
            f"does, each by itself: leave {named[0]} out"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PrivacyError(
            f"Poisson sampling needs a data set with a length and with samples by "
            f"number, got {type(dataset).__name__}"
        )
