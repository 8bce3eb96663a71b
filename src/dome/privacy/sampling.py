"""Poisson batches: every sample is in a batch with the same probability, by itself.

The accountants assume this, and nothing else will do: shuffled batches of fixed size
have another, larger epsilon. A batch is recognised again by digests of its samples.
Every entry's value is mixed into 64 bits and the numbers are added up, so that a digest
does not depend on the order of entries: samples may be reshaped and transposed. Two
samples that differ have the same digest with a probability of about 2⁻⁶⁴.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dome.privacy.accounting import PrivacyError
from dome.privacy.releases import Randomness
from dome.samples.tracing.nested import all_tensors

# Odd, with bits all over: the finaliser of SplitMix64 (Steele et al. 2014).
FIRST, SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Entries that are mixed at once: what a core's cache holds, and what fills a device.
AT_ONCE, AT_ONCE_ON_A_DEVICE = 1 << 16, 1 << 24
WHOLE = -1  # in the place of a dimension


@dataclass(frozen=True)
class Marks:
    """Per-sample digests, computed at collation, that identify a batch.

    Attributes:
        size: Number of samples B.
        digests: Of each tensor in it, by the dimension that may enumerate samples.
    """

    size: int
    digests: list[dict[int, list[int]]]


class PoissonSampler:
    """Lists of indices, one per batch.

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
        return num_batches(self._sample_rate)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            drawn = self._randomness.uniform(self._num_samples) < self._sample_rate
            yield drawn.nonzero().flatten().tolist()


def num_batches(sample_rate: float) -> int:
    """How many batches a pass over a loader has."""
    # A rounding error must not take a batch from 1 / 0.2 of them.
    return int(1 / sample_rate + 1e-9)


class PoissonLoader:
    """Batches for private training; one pass has 1 / sample_rate of them.

    Args:
        dataset: What is kept private; it has a length.
        sample_rate: Probability that a sample is in a batch.
        randomness: Draws the decisions.
        draw: Is shown every batch before it is handed out, so that a step with other
            samples, or a batch without a step, is noticed, whatever the number of
            iterators.
        collate_fn: Makes a batch of samples, as in ``DataLoader``.
        **options: Those of ``DataLoader`` that do not choose samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        randomness: Randomness,
        draw: Callable[[Marks, object], None],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 (DataLoader names and checks them)
    ) -> None:
        # Opacus' collation gives empty batches their shape.
        from opacus.data_loader import wrap_collate_with_empty

        choosing = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
        for name in sorted(choosing & options.keys()):
            raise PrivacyError(
                f"{name} chooses samples, but the accountant assumes that each is "
                f"drawn independently with sample_rate: leave {name} out"
            )
        self.dataset, self.num_samples, self._draw = dataset, size_of(dataset), draw
        self._sampler = PoissonSampler(self.num_samples, sample_rate, randomness)
        collate = wrap_collate_with_empty(collate_fn=collate_fn or default_collate)
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

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        for marks, batch in self._loader:
            self._draw(marks, batch)
            yield batch


class _Marked:
    """A collation that computes the marks of its batch, in whatever process."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Marks, Any]:
        batch, size = self._collate(samples), len(samples)
        found = all_tensors(batch)
        if not found:
            raise PrivacyError(
                f"a batch of the loader has no tensors ({type(batch).__name__}), so "
                "dome cannot check that a step uses its samples: make tensors in the "
                "data set or in collate_fn"
            )
        # Every dimension that may enumerate samples; without one, the whole tensor.
        dims = [[d for d, n in enumerate(t.shape) if n == size] for t in found]
        digests = [
            {dim: marked(t, dim) for dim in places or [WHOLE]}
            for t, places in zip(found, dims, strict=True)
        ]
        return Marks(size, digests), batch


def size_of(dataset: object) -> int:
    """The number of samples N; refused if samples cannot be drawn by number."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PrivacyError(
            f"Poisson sampling needs a data set with a length and with samples by "
            f"number, got {type(dataset).__name__}"
        )
    return len(dataset)


def marked(t: Tensor, dim: int) -> list[int]:
    """The digests of a tensor's samples along a dimension, or of the whole tensor."""
    return [digest(t)] if dim == WHOLE else sample_digests(t, dim)


def sample_digests(samples: Tensor, dim: int) -> list[int]:
    """One number for each of the samples that lie along a dimension."""
    rows = samples.detach().movedim(dim, 0)
    return [
        number
        for part in _parts(rows)
        for number in _mixed(part).reshape(len(part), -1).sum(dim=1).tolist()
    ]


def digest(values: Tensor) -> int:
    """One number for all entries together."""
    flat = values.detach().reshape(-1)
    total = sum(int(_mixed(part).sum()) for part in _parts(flat))
    return (total + 2**63) % 2**64 - 2**63  # as an int64 would have it


def _parts(rows: Tensor) -> Iterator[Tensor]:
    if rows.numel():
        room = AT_ONCE if rows.is_cpu else AT_ONCE_ON_A_DEVICE
        yield from rows.split(max(1, room * len(rows) // rows.numel()))


def _mixed(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values)
    # A float64 holds what a shorter number or a usual integer holds, exactly; adding
    # zero makes -0 the same as 0, and a copy.
    bits = (values.to(torch.float64) + 0.0).view(torch.int64)
    bits.mul_(FIRST)
    bits.bitwise_xor_(bits >> 32)
    return bits.mul_(SECOND)
