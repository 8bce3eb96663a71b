"""Squared norms of samples that are products, without their rows.

    ‖Σ_t l_t r_tᵀ‖² = Σ_tt' (l_t · l_t') (r_t · r_t')        T² (n + m) flops a sample

Rows take T n m. Where that is less, the rows of a few samples are formed, measured and
dropped. Shapes: weight (n, m), B samples, T positions.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from dome.trackers.factors import FactorBatch, OneHot, Product, Side, Use

NUMBERS_AT_ONCE = 1 << 22  # of what is formed on the way


def squared_lengths(batch: FactorBatch) -> Tensor:
    """‖g_b‖² of every sample over all parameters of a batch, shape (B,), float64."""
    lengths = [lengths_of(uses, len(batch)) for uses in batch.uses.values() if uses]
    return torch.stack(lengths).sum(0) if lengths else torch.zeros(len(batch)).double()


def lengths_of(uses: Sequence[Use], num_samples: int) -> Tensor:
    """The same of one parameter, from what adds up to its samples: one use or more."""
    together: dict[tuple[int, int], list[Tensor | Product]] = {}
    for use in uses:
        place = use.samples.start, use.samples.stop
        together.setdefault(place, []).append(use.grads)
    found = {at: _of_sum(parts, at[1] - at[0]) for at, parts in together.items()}
    total = next(iter(found.values())).new_zeros(num_samples)
    for (first, last), lengths in found.items():
        total[first:last] += lengths
    return total


def _of_sum(parts: Sequence[Tensor | Product], num_samples: int) -> Tensor:
    """Squared norms (b,) of samples that are sums of rows and products."""
    products = [part for part in parts if isinstance(part, Product)]
    paired = len(products) == len(parts) and _pairs_are_cheaper(products)
    apart = num_samples
    if products:
        numbers = max(_numbers_of(p, paired=paired) for p in products)
        apart = max(1, NUMBERS_AT_ONCE // numbers)
    found = []
    for first in range(0, num_samples, apart):
        samples = slice(first, min(first + apart, num_samples))
        some = [_part(part, samples) for part in parts]
        found.append(_of_pairs(some) if paired else _of_written(some))
    return torch.cat(found)


def _of_written(parts: Sequence[Tensor | Product]) -> Tensor:
    rows = [p.rows().flatten(1) if isinstance(p, Product) else p for p in parts]
    whole = sum(rows[1:], rows[0])
    return torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64).square()


def _of_pairs(parts: Sequence[Tensor | Product]) -> Tensor:
    """Over all pairs of positions, of one use and of two."""
    total: Tensor | None = None
    products = [part for part in parts if isinstance(part, Product)]
    for i, one in enumerate(products):
        for other in products[i:]:
            left, a = _inner(one.left, other.left)
            right, b = _inner(one.right, other.right)
            dots = (left * right).sum((1, 2), dtype=torch.float64) * a * b
            dots = dots if one is other else 2 * dots
            total = dots if total is None else total + dots
    if total is None:
        raise ValueError("no product to measure: give at least one")
    return total.clamp(min=0.0)


def _inner(one: Side, other: Side) -> tuple[Tensor, Tensor]:
    """Inner products of positions (b, T, T'), and the factor that was taken out.

    Squares leave the range of float32 long before vectors do.
    """
    if isinstance(one, OneHot) and isinstance(other, OneHot):
        same = one.index[:, :, None] == other.index[:, None]
        return same, torch.ones((), dtype=torch.float64, device=same.device)
    if isinstance(one, OneHot):
        inner, factor = _inner(other, one)
        return inner.mT, factor
    x, a = _in_range(one.written_out())
    if isinstance(other, OneHot):
        index = other.index[:, None].expand(-1, x.shape[1], -1)
        return x.gather(2, index), a
    if one is other:
        return x @ x.mT, a * a
    y, b = _in_range(other.written_out())
    return x @ y.mT, a * b


def _in_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors over the largest of their numbers, and that number."""
    largest = torch.linalg.vector_norm(x, torch.inf)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return x / largest, largest.double()


def _pairs_are_cheaper(products: Sequence[Product]) -> bool:
    pairs = rows = 0
    for product in products:
        n, m, T = product.left.size, product.right.size, product.num_positions
        dense = [s.size for s in (product.left, product.right) if _is_dense(s)]
        pairs += len(products) * T * T * (sum(dense) + 1)
        rows += (T + 1) * n * m
    return pairs <= rows


def _is_dense(side: Side) -> bool:
    return not isinstance(side, OneHot)


def _numbers_of(product: Product, *, paired: bool) -> int:
    """Numbers a sample that are formed to measure it."""
    T = product.num_positions
    held = T * (product.left.size * _is_dense(product.left) + product.right.size)
    wanted = 2 * T * T if paired else product.left.size * product.right.size
    return held + wanted


def _part(grads: Tensor | Product, samples: slice) -> Tensor | Product:
    """Some of the samples."""
    if isinstance(grads, Tensor):
        return grads[samples]
    left, right = _side(grads.left, samples), _side(grads.right, samples)
    return Product(left, left if grads.left is grads.right else right)


def _side(side: Side, samples: slice) -> Side:
    held = {f.name: getattr(side, f.name) for f in fields(side)}  # type: ignore[arg-type] # all sides are dataclasses
    cut = {name: x[samples] for name, x in held.items() if isinstance(x, Tensor)}
    return replace(side, **cut)  # type: ignore[type-var] # as above
