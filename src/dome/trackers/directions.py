"""K directions of a whole model: thin in its weight matrices, as they are elsewhere.

Shapes: U (D, K), which is never formed; G (B, D) samples, parameter by parameter. A
parameter with min(n, m) ≤ r, as biases and norms are, has ordinary columns, which take
no more room there, and so has a weight that is small beside the others; those of all
such parameters lie in one matrix (K, n'), a direction a row: products with few rows
take half the time of those with few columns.

Where workers hold rows of every parameter (``fully_shard``), P and the plain columns
are cut as these are, and Q is held by all: what an update sends are Q, K r m numbers
for each weight, and sums of K (B + K) numbers. To cut Q too would save those of P
workers but one, and make every worker gather it again for each product with samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.torch_private import flattened, subtract_each_, unflattened
from dome.trackers.factors import FactorBatch, Product, Units, Use, Vectors
from dome.trackers.linalg import IsTrue, Shard, Total, alone
from dome.trackers.thin import (
    SMALL_WEIGHT,
    Cut,
    Kept,
    Spread,
    Thin,
    is_thin,
    orthonormal,
    used_up,
)

# Squared share that one of r columns must have of its own to be a direction.
FLOOR = {torch.float32: 1e-9, torch.float64: 1e-18}


@dataclass(frozen=True, slots=True)
class Shapes:
    """Where parameters lie in the flat gradient, and which of them are thin.

    Attributes:
        thin: First column and shape (n, m) of each weight with thin directions; n of
            those rows that are held here.
        plain: First column and shape of each other parameter, likewise.
        cuts: What is held of each, by first column.
        dim: D.
        rank: r.
        total: Adds up tensors over workers that hold the other rows.
    """

    thin: dict[int, torch.Size]
    plain: dict[int, torch.Size]
    cuts: dict[int, Cut]
    dim: int
    rank: int
    total: Total = alone

    @staticmethod
    def of(
        shapes: Sequence[Sequence[int]], rank: int, shard: Shard | None = None
    ) -> "Shapes":
        """Of parameters in the order of the flat gradient.

        Args:
            shapes: Of the whole parameters.
            rank: r.
            shard: One range for each parameter, of whole rows, if workers hold others.
        """
        thin: dict[int, torch.Size] = {}
        plain: dict[int, torch.Size] = {}
        cuts: dict[int, Cut] = {}
        start = here = 0
        wholes = [torch.Size(sizes) for sizes in shapes]
        dim = sum(shape.numel() for shape in wholes)
        for i, shape in enumerate(wholes):
            num_rows = shape[0] if shape else 1
            width = shape[1:].numel()
            stop = start + shape.numel()
            part = slice(start, stop) if shard is None else shard.ranges[i]
            rows = slice((part.start - start) // width, (part.stop - start) // width)
            num = part.stop - part.start
            cuts[start] = Cut(slice(here, here + num), rows, num_rows)
            held = torch.Size((rows.stop - rows.start, *shape[1:]))
            kind = thin if is_thin(shape, rank, dim) else plain
            kind[start] = held if shape else shape
            start, here = stop, here + num
        total = alone if shard is None else shard.total
        return Shapes(thin, plain, cuts, dim, rank, total)

    def columns(self) -> dict[int, slice]:
        """The numbers of each parameter, among those held here."""
        return {start: cut.columns for start, cut in self.cuts.items()}

    def plain_rows(self, whole: Tensor) -> Tensor:
        """Of rows for all numbers of plain parameters, those held here."""
        parts, first = [], 0
        for start, shape in self.plain.items():
            _, rows, num_rows = self.cuts[start]
            width = shape[1:].numel()
            parts.append(whole[first + rows.start * width : first + rows.stop * width])
            first += num_rows * width
        return torch.cat(parts) if parts else whole


@dataclass(frozen=True, slots=True)
class Products:
    """What a batch has in common with directions, and what is kept for ``cut``.

    Attributes:
        GU: Shape (B, K).
        kept: Of each weight.
        rows: Samples of the plain parameters, shape (B, n').
    """

    GU: Tensor
    kept: dict[int, Kept]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Directions:
    """K directions.

    Attributes:
        shapes: Of the parameters.
        thin: In weight matrices, by their first column.
        plain: In the other parameters, shape (K, n').
    """

    shapes: Shapes
    thin: dict[int, Thin]
    plain: Tensor

    @staticmethod
    def random(
        shapes: Shapes, num: int, generator: torch.Generator, dtype: torch.dtype
    ) -> "Directions":
        """Random directions, of length one or nearly."""
        r, D = shapes.rank, shapes.dim

        def noise(rows: int, width: int, scale: float) -> Tensor:
            device = generator.device
            drawn = torch.randn(
                (rows, width), generator=generator, dtype=dtype, device=device
            )
            return drawn.mul_(scale)

        thin = {}
        for start, shape in shapes.thin.items():
            _, rows, num_rows = shapes.cuts[start]
            # Drawn whole, so that it is the same on any number of workers.
            P = noise(num_rows, num * r, 1.0)
            P = P if rows == slice(0, num_rows) else P[rows].clone()
            Q = noise(shape[1:].numel(), num * r, (r * D) ** -0.5)
            thin[start] = Thin.of_columns(P, Q, num)
        length = sum(
            shapes.cuts[start].num_rows * shape[1:].numel()
            for start, shape in shapes.plain.items()
        )
        plain = shapes.plain_rows(noise(length, num, D**-0.5))
        return Directions(shapes, thin, plain.T.contiguous())

    @property
    def num(self) -> int:
        """K."""
        return self.plain.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        return self.plain.dtype

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        stored = {"plain": self.plain.T.contiguous()}
        for i, thin in enumerate(self.thin.values()):
            P, Q = thin.columns
            stored |= {f"left_{i}": P, f"right_{i}": Q}
        return stored

    @property
    def num_stored(self) -> int:
        """How many numbers that are."""
        thin = sum(t.P.numel() + t.Q.numel() for t in self.thin.values())
        return self.plain.numel() + thin

    def with_tensors(self, stored: Mapping[str, Tensor]) -> "Directions":
        """Directions of the same shapes from what was stored."""
        thin = {
            start: Thin.of_columns(
                stored[f"left_{i}"].to(old.P, copy=True),
                stored[f"right_{i}"].to(old.Q, copy=True),
                old.num,
            )
            for i, (start, old) in enumerate(self.thin.items())
        }
        plain = stored["plain"].to(self.plain, copy=True).T.contiguous()
        return Directions(self.shapes, thin, plain)

    def prepared(self, batch: FactorBatch) -> FactorBatch:
        """A batch that is no rows in large weights, where Y would be as large as U.

        There a sample (n, m) is the product of n unit vectors and its own rows.
        """
        uses = dict(batch.uses)
        for start, shape in self.shapes.thin.items():
            if shape.numel() > SMALL_WEIGHT and start in uses:
                uses[start] = [_of_unit_vectors(use, shape) for use in uses[start]]
        return FactorBatch(batch.num_samples, uses)

    def products(self, batch: FactorBatch) -> Products:
        """G U, and what is needed of it again."""
        rows = self._rows(batch)
        GU = rows @ self.plain.T
        kept = {
            start: thin.coordinates(batch.of(start), GU)
            for start, thin in self.thin.items()
        }
        (GU,) = self.shapes.total(GU)
        return Products(GU, kept, rows)

    def cut(
        self,
        batch: FactorBatch,
        seen: Products,
        C: Tensor,
        M: Tensor,
        seed: int,
        total: Total,
        is_true: IsTrue = bool,
    ) -> "Directions":
        """U C + Gᵀ M, of which each column keeps rank r in every weight.

        Args:
            batch: The samples.
            seen: Their products with these directions.
            C: Shape (K, K).
            M: Shape (B, K).
            seed: Of random directions in weights where a column has fewer than r.
            total: Adds up tensors over workers with samples of their own.
            is_true: What to believe of there being none such.
        """
        is_alone = total is alone
        C, M = C.to(self.dtype), M.to(self.dtype)
        spread = Spread((C, M), self.shapes.rank)
        uses = {start: batch.of(start) for start in self.thin}
        *lefts, plain = total(
            *(
                thin.left_products(uses[s], seen.kept[s], spread, is_alone)
                for s, thin in self.thin.items()
            ),
            M.T @ seen.rows,
        )
        stacks = [
            X if seen.kept[s].has_past else thin.past_left(spread).add_(X)
            for (s, thin), X in zip(self.thin.items(), used_up(lefts), strict=True)
        ]
        cuts = [self.shapes.cuts[s] for s in self.thin]
        floor, over_rows = FLOOR[self.dtype], self.shapes.total
        Ps = orthonormal(stacks, floor, seed, is_true, cuts, over_rows)
        rights = list(
            total(
                *(
                    thin.right_products(P, uses[s], seen.kept[s], spread)
                    for (s, thin), P in zip(self.thin.items(), Ps, strict=True)
                )
            )
        )
        wholes = [
            Q if seen.kept[s].has_past else thin.past_right(P, spread).add_(Q)
            for (s, thin), P, Q in zip(
                self.thin.items(), Ps, used_up(rights), strict=True
            )
        ]
        if wholes:
            wholes = list(over_rows(*wholes))
        new = {s: Thin(P, Q) for s, P, Q in zip(self.thin, Ps, wholes, strict=True)}
        return Directions(self.shapes, new, torch.addmm(plain, C.T, self.plain))

    def gram(self, other: "Directions") -> Tensor:
        """Uᵀ W of other directions, float64, shape (K, K)."""
        N = (self.plain @ other.plain.T).double()
        if self.thin:
            parts = [thin.overlaps(other.thin[s]) for s, thin in self.thin.items()]
            each = (self.num, self.shapes.rank)
            added = torch.stack(parts).sum(0, dtype=torch.float64)
            N += added.view(*each, *each).sum((1, 3))
        (whole,) = self.shapes.total(N)
        return whole

    def replaced(self, mask: Tensor, others: "Directions") -> "Directions":
        """Those of other directions in place of some."""
        each = mask[:, None, None]

        def choose(own: Thin, other: Thin) -> Thin:
            P, Q = torch.where(each, other.P, own.P), torch.where(each, other.Q, own.Q)
            return Thin(P, Q)

        thin = {s: choose(t, others.thin[s]) for s, t in self.thin.items()}
        plain = torch.where(mask[:, None], others.plain, self.plain)
        return Directions(self.shapes, thin, plain)

    def dot(self, grads: Mapping[int, Tensor]) -> Tensor:
        """Uᵀ g of a gradient, parameter by parameter, float64, shape (K,)."""
        dots = [t.dot(grads[s]) for s, t in self.thin.items() if s in grads]
        if self.shapes.plain:
            dots.append(self.plain @ flattened(self._plain_of(grads)))
        (whole,) = self.shapes.total(torch.stack(dots).sum(0, dtype=torch.float64))
        return whole

    def remove_(self, grads: Mapping[int, Tensor], c: Tensor) -> None:
        """Subtract U c from a gradient, parameter by parameter."""
        c = c.to(self.dtype)
        each = c.view(-1, 1, 1)
        for s, thin in self.thin.items():
            if s in grads:
                thin.remove_(grads[s], each)
        if self.shapes.plain:
            plain = self._plain_of(grads)
            subtract_each_(plain, unflattened(c @ self.plain, plain))

    def written_out(self) -> Tensor:
        """U after all, shape (D, K)."""
        parts = {s: thin.written_out().T for s, thin in self.thin.items()}
        sizes = [shape.numel() for shape in self.shapes.plain.values()]
        plain = self.plain.T.split(sizes)
        parts |= dict(zip(self.shapes.plain, plain, strict=True))
        return torch.cat([parts[start] for start in sorted(parts)])

    def _plain_of(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """Gradients of the plain parameters; zeros for those that have none."""
        return [
            grads[s] if s in grads else self.plain.new_zeros(shape)
            for s, shape in self.shapes.plain.items()
        ]

    def _rows(self, batch: FactorBatch) -> Tensor:
        """Samples of the plain parameters, shape (B, n')."""
        B, dtype = len(batch), self.dtype
        parts = []
        for start, shape in self.shapes.plain.items():
            uses = batch.of(start)
            if uses:
                rows = batch.rows_of(start)
                parts.append(rows if rows.dtype == dtype else rows.to(dtype))
            else:
                parts.append(self.plain.new_zeros(B, shape.numel()))
        return torch.cat(parts, 1) if parts else self.plain.new_zeros(B, 0)


def _of_unit_vectors(use: Use, shape: torch.Size) -> Use:
    if isinstance(use.grads, Product):
        return use
    rows = use.grads.unflatten(1, shape).flatten(2)
    units = Units(len(rows), rows.shape[1])
    return Use(use.samples, Product(units, Vectors(rows)))
