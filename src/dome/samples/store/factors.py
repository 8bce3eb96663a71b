"""The samples of one backward pass as what they are products of.

A weight's samples are kept as its inputs and output gradients, by reference, until the
step uses them. Rows (B, *parameter) are kept of what has no such factors (biases,
norms, weights that are made of other weights) and of small weights that meet so many
positions of a sample that rows are the faster of the two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.parameters import Slot
from dome.samples.store.sink import Pass
from dome.torch_private import version_of, versions_of
from dome.trackers.factors import FactorBatch, Product, Use
from dome.trackers.thin import SMALL_WEIGHT, can_be_thin


class FactorGroup:
    """The samples of one backward pass and one batch size, parameter by parameter.

    Args:
        num_rows: B.
        task: The backward pass.
        dtype: Of rows.
        device: Where they are.
        rank: Of the directions that products are kept for.
        spare: Buffers of former steps, by the first column of a parameter.
    """

    def __init__(
        self,
        num_rows: int,
        task: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        spare: dict[int, Tensor],
    ) -> None:
        self.num_rows = num_rows
        self.task = task
        self.written: set[int] = set()
        self.passes: set[Pass] = set()
        self._dtype, self._device, self._rank = dtype, device, rank
        self._spare = spare
        self._rows: dict[int, _Kept] = {}
        # Each with how often its tensors were written to when it was taken.
        self._products: dict[int, list[tuple[Product, list[int]]]] = {}
        self._coarse: dict[int, torch.dtype] = {}

    def room(self, slot: Slot, dtype: torch.dtype, zero: bool) -> Tensor | None:
        """Space (B, *parameter) to be written by the caller: see ``Group``."""
        if dtype != self._dtype:
            return None
        found = self._rows.get(slot.start)
        if found is None:
            buffer = self._spare.pop(slot.start, None)
            if buffer is None or len(buffer) < self.num_rows or buffer.dtype != dtype:
                shape = (self.num_rows, *slot.shape)
                buffer = torch.empty(shape, dtype=dtype, device=self._device)
            rows = buffer[: self.num_rows]
            self._note(slot, dtype)
            self._rows[slot.start] = _Kept(rows, buffer)
            return rows.zero_() if zero else rows
        return found.rows if zero and found.buffer is not None else None

    def keep(self, slot: Slot, product: Product) -> bool:
        """Take samples as a product, if that is cheaper; else rows are to be made."""
        n, m, rank = product.left.size, product.right.size, self._rank
        # Products of K directions with rows take K n m flops a sample, with factors
        # K r T (n + m). At ResNet-8's sizes rows take a third of the time.
        is_long = product.num_positions * rank * (n + m) > n * m
        if (is_long and n * m <= SMALL_WEIGHT) or not can_be_thin(slot.shape, rank):
            return False
        held = product, versions_of(product.tensors)
        self._products.setdefault(slot.start, []).append(held)
        self._note(slot, product.dtype)
        return True

    def add(self, slot: Slot, grads: Tensor, dtype: torch.dtype) -> None:
        """Take rows (B, *parameter), which were computed in a type."""
        found = self._rows.get(slot.start)
        self._note(slot, dtype)
        if found is None:
            self._rows[slot.start] = _Kept(grads, None, version_of(grads))
        elif found.buffer is not None:
            found.rows.add_(grads)
        else:
            rows = found.rows + grads
            self._rows[slot.start] = _Kept(rows, None, version_of(rows))

    def parts(self, slot: Slot, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum of a parameter's samples, and what rounding is measured by."""
        totals: list[Tensor] = []
        squares = torch.zeros((), dtype=kind, device=self._device)
        found = self._rows.get(slot.start)
        if found is not None:
            totals.append(found.rows.sum(0, dtype=kind))
            wide = torch.promote_types(found.rows.dtype, kind)
            squares += torch.linalg.vector_norm(found.rows, dtype=wide).square()
        for product, _ in self._products.get(slot.start, ()):
            some = product.total().reshape(slot.shape).to(kind)
            totals = [totals[0].add_(some) if totals else some]
            squares += product.squares()
        return totals[0], squares.sqrt()

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """The coarsest type in which a parameter's samples were computed."""
        return self._coarse.get(slot.start, self._dtype)

    def absorb(self, other: "FactorGroup", slots: Iterable[Slot]) -> None:
        """Add the samples of another group, which are of the same."""
        self.passes |= other.passes
        for slot in slots:
            rows = other._rows.get(slot.start)
            if rows is not None:
                self.add(slot, rows.rows, other.dtype_of(slot))
            for held in other._products.get(slot.start, ()):
                self._products.setdefault(slot.start, []).append(held)
                self._note(slot, other.dtype_of(slot))

    def uses(self, slot: Slot, samples: slice) -> list[Use]:
        """What adds up to a parameter's samples; an error if it was written to."""
        found: list[Use] = []
        for product, versions in self._products.get(slot.start, ()):
            if versions_of(product.tensors) != versions:
                raise _written_to(slot)
            found.append(Use(samples, product))
        rows = self._rows.get(slot.start)
        if rows is not None:
            if rows.buffer is None and version_of(rows.rows) != rows.version:
                raise _written_to(slot)
            size = slot.stop - slot.start  # flatten(1) knows no single number
            found.append(Use(samples, rows.rows.reshape(-1, size)))
        return found

    def buffers(self) -> dict[int, Tensor]:
        """Space to be used again."""
        rows = self._rows.items()
        return {s: kept.buffer for s, kept in rows if kept.buffer is not None}

    def _note(self, slot: Slot, dtype: torch.dtype) -> None:
        self.written.add(slot.start)
        coarsest = self._coarse.get(slot.start, self._dtype)
        if dtype != coarsest and torch.finfo(dtype).eps > torch.finfo(coarsest).eps:
            self._coarse[slot.start] = dtype


@dataclass(slots=True, eq=False)  # never changed: a frozen one takes twice as long
class _Kept:
    """Rows, and the buffer they lie in if it is ours to write to.

    Else they are held by reference, and ``version`` is how often they were written to.
    """

    rows: Tensor
    buffer: Tensor | None
    version: int = 0


def _written_to(slot: Slot) -> RuntimeError:
    return RuntimeError(
        f"the inputs of {slot.name!r}, or its output gradients, were written to in "
        f"place between backward() and the step, where direction_rank needs them: "
        f"give the model a new tensor instead of writing the next batch into the "
        f"old one"
    )


def batch_of(groups: Sequence[FactorGroup], slots: Sequence[Slot]) -> FactorBatch:
    """The samples of several groups, one behind the other."""
    uses: dict[int, list[Use]] = {}
    first = 0
    for group in groups:
        samples = slice(first, first + group.num_rows)
        for slot in slots:
            uses.setdefault(slot.start, []).extend(group.uses(slot, samples))
        first = samples.stop
    return FactorBatch(first, uses)
