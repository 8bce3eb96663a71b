"""The weight matrices in a flat gradient, and products of thin matrices for them.

Shapes: a matrix M (n, m) is replaced by P Qᵀ with P (n, r) and Q (m, r). ``left``
holds the P of all matrices, one after the other and flat, ``right`` the Q, ``rest``
what is in no matrix.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dome.compression.vector import power_of_two


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a matrix (n, m) lies in the flat gradient."""

    start: int
    num_rows: int
    num_columns: int

    def view(self, vector: Tensor) -> Tensor:
        """M, the matrix in a vector (D,), as a view of shape (n, m)."""
        n, m = self.num_rows, self.num_columns
        return vector[self.start : self.start + n * m].view(n, m)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of a model and the rank of what replaces them.

    Attributes:
        matrices: Those that become smaller.
        rest: Ranges of all other entries.
        dim: D.
        rank: r.
    """

    matrices: tuple[Matrix, ...]
    rest: tuple[slice, ...]
    dim: int
    rank: int

    @property
    def num_left(self) -> int:
        """Numbers in all P."""
        return self.rank * sum(matrix.num_rows for matrix in self.matrices)

    @property
    def num_right(self) -> int:
        """Numbers in all Q."""
        return self.rank * sum(matrix.num_columns for matrix in self.matrices)

    @property
    def num_rest(self) -> int:
        """Numbers in no matrix."""
        return sum(part.stop - part.start for part in self.rest)

    def times_right(self, vector: Tensor, right: Tensor) -> Tensor:
        """M Q of every matrix of a vector (D,): a left."""
        pairs = zip(self.matrices, self._rights(right), strict=True)
        return _flat(vector, [M.view(vector) @ Q for M, Q in pairs])

    def times_left(self, vector: Tensor, left: Tensor) -> Tensor:
        """Mᵀ P of every matrix of a vector (D,): a right."""
        pairs = zip(self.matrices, self._lefts(left), strict=True)
        return _flat(vector, [M.view(vector).T @ P for M, P in pairs])

    def orthonormal(self, left: Tensor) -> Tensor:
        """An orthonormal basis of every P, filled up where columns are dependent."""
        return _flat(left, [torch.linalg.qr(P)[0] for P in self._lefts(left)])

    def unit_columns(self, right: Tensor, fresh: Tensor) -> Tensor:
        """Every Q with columns of length 1; columns of zeros are taken from ``fresh``.

        The span is all that the next step needs of Q. A gradient of 10⁻²⁰ would vanish
        in M Q otherwise, and a column of zeros would never become another.
        """
        pairs = zip(self._rights(right), self._rights(fresh), strict=True)
        columns = [torch.where(Q.any(dim=0), Q, new) for Q, new in pairs]
        return _flat(right, [_units(Q) for Q in columns])

    def rest_of(self, vector: Tensor) -> Tensor:
        """What is in no matrix of a vector (D,)."""
        return _flat(vector, [vector[part] for part in self.rest])

    def assembled(self, left: Tensor, right: Tensor, rest: Tensor) -> Tensor:
        """The vector (D,) of the products P Qᵀ and the rest."""
        vector = left.new_empty(self.dim)
        pairs = zip(self._lefts(left), self._rights(right), strict=True)
        for matrix, (P, Q) in zip(self.matrices, pairs, strict=True):
            torch.mm(P, Q.T, out=matrix.view(vector))
        parts = rest.split([part.stop - part.start for part in self.rest])
        for part, values in zip(self.rest, parts, strict=True):
            vector[part] = values
        return vector

    def _lefts(self, left: Tensor) -> Iterator[Tensor]:
        rows = [matrix.num_rows for matrix in self.matrices]
        return _thin(left, rows, self.rank)

    def _rights(self, right: Tensor) -> Iterator[Tensor]:
        columns = [matrix.num_columns for matrix in self.matrices]
        return _thin(right, columns, self.rank)


def low_rank(shapes: Iterable[Sequence[int]], rank: int) -> LowRank:
    """What becomes smaller of parameters with these shapes, which lie in this order.

    A matrix is a parameter of two or more dimensions, all but the first flattened.
    """
    matrices, rest, start = [], [], 0
    for shape in shapes:
        size = prod(shape)
        n = shape[0] if len(shape) > 1 else 1
        m = size // n if n else 0
        if len(shape) > 1 and rank * (n + m) < n * m:
            matrices.append(Matrix(start, n, m))
        else:
            rest.append(slice(start, start + size))
        start += size
    return LowRank(tuple(matrices), tuple(rest), start, rank)


def _thin(flat: Tensor, lengths: list[int], rank: int) -> Iterator[Tensor]:
    for part in flat.split([length * rank for length in lengths]):
        yield part.view(-1, rank)


def _flat(like: Tensor, parts: list[Tensor]) -> Tensor:
    """All parts one after the other; nothing, of the dtype of ``like``, for none."""
    return torch.cat([like.new_empty(0), *(part.flatten() for part in parts)])


def _units(Q: Tensor) -> Tensor:
    """The columns of Q, none of them zero, with length 1."""
    # Squares of very small or large entries would vanish or overflow.
    Q = Q / power_of_two(Q.abs().amax(dim=0))
    return Q / torch.linalg.vector_norm(Q, dim=0, dtype=torch.float64).to(Q.dtype)
