"""Samples that are walked over more than once: a pair of tensors, or batches."""

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from torch import Tensor

Batch = tuple[Tensor, Tensor]
Data = Batch | Iterable[Batch]


class Batches:
    """The samples of a data set, batch by batch, as often as they are asked for.

    Args:
        data: Inputs and targets (x, y), which are split; or anything that gives such
            pairs every time it is iterated, such as a list or a ``DataLoader``. Every
            walk must give the same samples: one that draws or drops some does not.
        batch_size: Samples in a part of (x, y); batches are taken as they come.
    """

    def __init__(self, data: Data, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if isinstance(data, Iterator):
            raise ValueError(
                f"data is {type(data).__name__}, which can be read only once: give a "
                "list of batches, a DataLoader, or (x, y)"
            )
        self._data: Iterable[object] = data
        if _is_pair(data):
            self._data = _split(*data, batch_size)
        self.num_samples = sum(len(x) for x, _ in self)
        if not self.num_samples:
            raise ValueError("data has no samples: give at least one")

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._data:
            if not _is_pair(batch):
                raise ValueError(
                    f"a batch must be inputs and targets (x, y), got "
                    f"{type(batch).__name__}"
                )
            yield batch


def _is_pair(data: object) -> TypeGuard[Batch]:
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(isinstance(part, Tensor) for part in data)
    )


def _split(x: Tensor, y: Tensor, batch_size: int) -> list[Batch]:
    if len(x) != len(y):
        raise ValueError(f"{len(x)} inputs and {len(y)} targets: one each is needed")
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))
