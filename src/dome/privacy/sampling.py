"""Poisson batches: every sample is in a batch with the same probability, by itself.

The accountants assume this, and nothing else will do: shuffled batches of fixed size
have another, larger epsilon. Opacus' collation gives empty batches their shape.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from opacus.data_loader import wrap_collate_with_empty
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as torch_collate

from dome.privacy.errors import PrivacyError
from dome.privacy.randomness import Randomness


class PoissonSampler:
    """Lists of indices, one a batch; remembers how long each was.

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
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        # A rounding error must not take a batch from 1 / 0.2 of them.
        return int(1 / self._sample_rate + 1e-9)

    def __iter__(self) -> Iterator[list[int]]:
        self.sizes.clear()
        for _ in range(len(self)):
            drawn = self._randomness.uniform(self._num_samples) < self._sample_rate
            indices = drawn.nonzero().flatten().tolist()
            self.sizes.append(len(indices))
            yield indices


class PoissonLoader:
    """Batches for private training; one pass has 1 / sample_rate of them.

    The filter asks it how many samples the batch of a step has, so that a step with
    other samples, or a batch without a step, is noticed.

    Args:
        dataset: What is kept private; it has a length.
        sample_rate: Probability that a sample is in a batch.
        randomness: Draws the decisions.
        collate_fn: Makes a batch of samples, as in ``DataLoader``.
        **options: Those of ``DataLoader`` that do not choose samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        randomness: Randomness,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 (DataLoader names and checks them)
    ) -> None:
        _check_options(dataset, options)
        self.dataset = dataset
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
            collate_fn=collate,
            generator=seeds,
            **options,
        )
        self._waiting: int | None = None

    @property
    def num_samples(self) -> int:
        """Size of the data set."""
        return len(cast("Any", self.dataset))

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._waiting = None
        for batch in self._loader:
            if self._waiting is not None:
                self._waiting = None
                raise PrivacyError(
                    "a batch was drawn and no step was taken with it: whether a step "
                    "is taken would tell about its samples. Call optimizer.step() for "
                    "every batch, also for an empty one"
                )
            # Workers fetch ahead, in order: sizes are taken in the same order.
            self._waiting = self._sampler.sizes.popleft()
            yield batch

    def take(self) -> int:
        """Size of the batch that is being trained on; a second call is refused."""
        if self._waiting is None:
            raise PrivacyError(
                "optimizer.step() without a batch of its own: every step takes one "
                "batch from .loader(dataset), because the accountant assumes Poisson "
                "sampling. A closure that is called twice, or a step outside the loop, "
                "would release a batch again without counting it"
            )
        size, self._waiting = self._waiting, None
        return size


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
