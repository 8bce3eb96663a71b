"""Samples as what they are products of, whose rows are formed when they are needed.

Shapes: G (B, D) samples, U = S Q (D, K). Rows of one parameter exist at a time: formed
for V = H U and, where B is small, H Hᵀ; formed again for what U takes in, Hᵀ V X. Where
B is large, Hᵀ V (D, K) is kept from the second time on: H Hᵀ would take more flops than
it saves, and B rows more room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dome.numerics.factors import FactorBatch
from dome.numerics.passes import as_they_are, compute_dtype
from dome.numerics.products import (
    Combination,
    Products,
    Rows,
    in_units,
    is_pairwise,
    power_for,
    questions,
)
from dome.numerics.shard import Shard
from dome.numerics.together import Steps


@dataclass(slots=True)
class Formed:
    """The samples ``scale * batch`` of one process: see ``Samples``.

    Attributes:
        batch: What rows are formed from, parameter by parameter.
        scale: Factor on all of them.
        power: What rows are multiplied by before they are centred, as in ``Rows``.
    """

    batch: FactorBatch
    scale: float | Tensor = 1.0
    power: Tensor | None = None
    _action: Tensor | None = field(default=None, init=False, repr=False)
    _room: Tensor | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.batch)

    def products(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Products]:
        """Products with each other and with U: sums of those of all parameters."""
        B, K, kind = len(self), S.shape[1], torch.float64
        pairwise = is_pairwise(K, B)
        # One for all parameters: pages of fresh memory take longer than the products.
        self._room = self.batch.room(S)
        HH = S.new_zeros(B, B, dtype=kind) if pairwise else None
        seen = Products(
            V=S.new_zeros(B, K, dtype=kind),
            m=S.new_zeros(K, dtype=kind),
            squares=S.new_zeros(B, dtype=kind),
            Hmu=S.new_zeros(B, dtype=kind),
            mu2=S.new_zeros((), dtype=kind),
            VHHV=S.new_zeros(K, K, dtype=kind),
        )
        for columns, part in self._parts():
            more = yield from part.prepared_products(
                S[columns], Q, shard, pairwise=pairwise
            )
            seen = seen.plus(more[0])
            HH = None if HH is None or more[1] is None else HH + more[1]
            del part  # before the next is formed
        if HH is None:
            HHV = yield from self._acted(seen.V, S, shard)
        else:
            HHV = HH @ seen.V
        return in_units(seen, HHV, self.unit)

    def _acted(self, V: Tensor, S: Tensor, shard: Shard) -> Steps[Tensor]:
        """H Hᵀ V of the prepared rows; Hᵀ V, on the way, is kept."""
        dtype, total = compute_dtype(S.dtype), torch.zeros_like(V)
        self._action = S.new_zeros(V.shape[1], len(S), dtype=dtype)
        for columns, part in self._parts():
            room = self._action[:, columns]
            total += yield from part.action(V, dtype, shard, out=room)
            del part
        return total

    def questions(self, seen: Products) -> tuple[Tensor, Tensor, Tensor]:
        """Is it finite; is it constant up to rounding; does it want more care?"""
        finite, constant, care = questions(seen, self.batch.dtype, self.scale)
        return finite, constant, care if self.power is None else torch.zeros_like(care)

    def careful(self, shard: Shard) -> Steps["Formed"]:
        """The same samples, to be multiplied and centred first."""
        largest = torch.zeros((), dtype=torch.float64)
        for _, part in self._parts():
            found = yield from part.largest(shard)
            largest = torch.maximum(largest.to(found), found)
            del part
        self._room = self._action = None  # the careful ones have their own
        return Formed(self.batch, self.scale, power_for(largest, self.batch.dtype))

    def combinations(self, V: Tensor, X: Tensor) -> Iterator[Combination]:
        """Hᵀ V X, a range of columns at a time; V is that of ``products``."""
        if self._action is not None:
            small = self.unit**2 * X
            yield Combination(slice(None), self._action, small, as_they_are)
            return
        done = 0
        for columns, part in self._parts():
            yield Combination(slice(done, columns.start))
            ((_, wide, own, prepare),) = part.combinations(V, X)
            yield Combination(columns, wide, own, prepare)
            done = columns.stop
            del part, wide
        yield Combination(slice(done, None))

    def coordinates(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Tensor]:
        """G U, shape (B, K)."""
        total = S.new_zeros(len(self), S.shape[1], dtype=torch.float64)
        for columns, part in self._parts():
            total += yield from part.coordinates(S[columns], Q, shard)
            del part
        return total

    @property
    def unit(self) -> Tensor | float:
        """What turns prepared rows into the samples, up to their mean."""
        return self.scale if self.power is None else self.scale / self.power

    def _parts(self) -> Iterator[tuple[slice, Rows]]:
        """The rows of one parameter after the other, where each has columns."""
        for start in sorted(self.batch.uses):
            if self.batch.of(start):
                rows = self.batch.rows_of(start, self._room)
                columns = slice(start, start + rows.shape[1])
                yield columns, Rows(rows, self.scale, self.power)
                del rows
