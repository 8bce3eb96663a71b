"""By what a batch is known again: the digests of its samples, made when it was made."""

from dataclasses import dataclass

from torch import Tensor

from dome.privacy.digests import digest, sample_digests
from dome.privacy.errors import PrivacyError
from dome.samples.tracing.nested import all_tensors

WHOLE = -1  # in the place of a dimension


@dataclass(frozen=True)
class Marks:
    """What a batch was, told by numbers.

    Attributes:
        size: Number of samples B.
        digests: Of each tensor in it, by the dimension that may enumerate samples.
    """

    size: int
    digests: list[dict[int, list[int]]]


def marks_of(size: int, batch: object) -> Marks:
    """The marks of a batch of so many samples."""
    found = all_tensors(batch)
    if not found:
        raise PrivacyError(
            f"a batch of the loader has no tensors ({type(batch).__name__}), so "
            f"that nobody can tell whether a step is taken with its samples: make "
            f"tensors in the data set or in collate_fn"
        )
    return Marks(size, [{dim: marked(t, dim) for dim in _dims(t, size)} for t in found])


def marked(t: Tensor, dim: int) -> list[int]:
    """The digests of a tensor's samples, or the one of all of it."""
    return [digest(t)] if dim == WHOLE else sample_digests(t, dim)


def _dims(t: Tensor, size: int) -> list[int]:
    """Dimensions that may enumerate samples; of a tensor that has none, all of it."""
    return [dim for dim, length in enumerate(t.shape) if length == size] or [WHOLE]
