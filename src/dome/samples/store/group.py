"""The samples of one backward pass and one batch size, side by side as rows.

Shapes: index (b, T) words of b samples, values (b, T, E) their gradients; B samples in
all, n different words of V.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from dome.parameters import Slot
from dome.samples.store.sink import Pass
from dome.trackers.factors import OneHot, Product, Vectors
from dome.trackers.parts import Part

# Numbers of an embedding from which its words are worth looking up.
LARGE = 2**16
# Takes a number of floats, gives zeros.
Room = Callable[[int], Tensor]


class RowGroup:
    """Rows (B, D), filled one parameter at a time.

    The words of a large embedding are kept as they come, and lie in no column.

    Args:
        buffer: At least as many rows as are needed.
        num_rows: B.
        task: The backward pass.
        places: The column in the buffer where a parameter begins, by where it begins in
            the flat gradient; large embeddings have none.
    """

    def __init__(
        self, buffer: Tensor, num_rows: int, task: int, places: Mapping[int, int]
    ) -> None:
        self.buffer = buffer
        self._places = places
        # Of large embeddings: words with their gradients, or all of them after all.
        self.words: dict[int, list[Product]] = {}
        self.whole: dict[int, Tensor] = {}
        self.rows = buffer[:num_rows]
        self.num_rows = num_rows
        self.task = task
        self.written: set[int] = set()
        self.passes: set[Pass] = set()
        self._coarse: dict[int, torch.dtype] = {}

    def view(self, slot: Slot) -> Tensor:
        """The columns of a parameter, shape (B, *parameter)."""
        place, size = self._places.get(slot.start), slot.stop - slot.start
        if place is None:
            columns = self._written_out(slot)
        else:
            columns = self.rows.narrow(1, place, size)
        if len(slot.shape) == 1:
            return columns
        return columns.view(self.num_rows, *slot.shape)

    def room(self, slot: Slot, dtype: torch.dtype, zero: bool) -> Tensor | None:
        """The columns of a parameter (B, *parameter), to be written by the caller.

        None if they hold a contribution already, or numbers of another type. With
        ``zero`` they are cleared, and offered for later contributions too.
        """
        fresh = slot.start not in self.written
        if self.rows.dtype != dtype or not (fresh or zero):
            return None
        self.written.add(slot.start)
        view = self.view(slot)
        return view.zero_() if zero and fresh else view

    def keep(self, slot: Slot, product: Product) -> bool:
        """Take the words of a large embedding; everything else is rows."""
        left, right = product.left, product.right
        is_large = slot.start not in self._places and slot.start not in self.whole
        if not is_large or not isinstance(left, OneHot):
            return False
        # A copy, small as a batch is: both may be written to before the step.
        values = Vectors(right.written_out().clone())
        kept = Product(OneHot(left.index.clone(), left.size), values)
        self.words.setdefault(slot.start, []).append(kept)
        self._note(slot, product.dtype)
        return True

    def uses(self, slot: Slot) -> list[tuple[Tensor, Tensor]]:
        """Words of samples (B, T) and their gradients (B, T, E), of an embedding."""
        return [
            (product.left.index, product.right.written_out().to(self.rows.dtype))
            for product in self.words.get(slot.start, ())
            if isinstance(product.left, OneHot)
        ]

    def _written_out(self, slot: Slot) -> Tensor:
        """All rows of a large embedding, shape (B, V·E)."""
        found = self.whole.get(slot.start)
        if found is None:
            found = self.rows.new_zeros(self.num_rows, *slot.shape)
            self.whole[slot.start] = found
            for index, values in self.uses(slot):
                found.scatter_add_(1, index[..., None].expand_as(values), values)
            self.words.pop(slot.start, None)
        return found.flatten(1)

    def parts(self, slot: Slot, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum of a parameter's rows, and their lengths: see ``audit``."""
        words = self.words.get(slot.start)
        if words is not None:
            total = reduce(torch.add, [product.total().to(kind) for product in words])
            squares = reduce(torch.add, [product.squares() for product in words])
            return total, squares.sqrt()
        rows = self.view(slot)
        # They are as wide as the widest parameter of the model.
        wide = torch.promote_types(rows.dtype, kind)
        return rows.sum(0, dtype=kind), torch.linalg.vector_norm(rows, dtype=wide)

    def add(self, slot: Slot, grads: Tensor, dtype: torch.dtype) -> None:
        """Write a first contribution (B, *parameter), add a later one.

        Args:
            slot: The parameter.
            grads: What to write.
            dtype: The type it was computed in.
        """
        if slot.start in self.written:
            self.view(slot).add_(grads)
        else:
            self.view(slot).copy_(grads)
        self._note(slot, dtype)

    def _note(self, slot: Slot, dtype: torch.dtype) -> None:
        self.written.add(slot.start)
        coarsest = self._coarse.get(slot.start, self.rows.dtype)
        if dtype != coarsest and torch.finfo(dtype).eps > torch.finfo(coarsest).eps:
            self._coarse[slot.start] = dtype

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """The coarsest type in which the rows of a parameter were computed."""
        return self._coarse.get(slot.start, self.rows.dtype)

    def finish(self, slots: Iterable[Slot]) -> None:
        """Clear the columns of parameters that this backward pass left out."""
        for slot in slots:
            if slot.start not in self.written and slot.start in self._places:
                self.view(slot).zero_()

    def absorb(self, other: "RowGroup", slots: Iterable[Slot]) -> None:
        """Add the rows of another group, of the same samples."""
        self.passes |= other.passes
        for slot in slots:
            if slot.start in other.words and slot.start not in self.whole:
                words = other.words[slot.start]
                self.words.setdefault(slot.start, []).extend(words)
                self._note(slot, other.dtype_of(slot))
            elif slot.start in other.written:
                self.add(slot, other.view(slot), other.dtype_of(slot))


def large_tables(model: nn.Module) -> list[Tensor]:
    """The weights of embeddings that are large."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [m.weight for m in model.modules() if isinstance(m, kinds)]
    return [weight for weight in found if weight.numel() >= LARGE]


def words_used(
    uses: Sequence[Sequence[tuple[Tensor, Tensor]]],
    num_samples: Sequence[int],
    columns: slice,
    shape: torch.Size,
    room: Room,
) -> Part:
    """The words that samples use, with a column for each of E numbers.

    Args:
        uses: What adds up to the samples of each group: index and values.
        num_samples: Of each group; they lie one below the other.
        columns: Of the embedding, among all.
        shape: (V, E).
        room: Where the rows go.
    """
    (V, E), B = shape, sum(num_samples)
    flat = [index.flatten() for some in uses for index, _ in some]
    if not flat:
        nothing = torch.zeros(0, dtype=torch.int64, device=room(0).device)
        return Part(room(0).view(B, 0), columns, nothing)
    words, where = torch.cat(flat).unique(return_inverse=True)
    is_most = 2 * len(words) > V
    n = V if is_most else len(words)
    places = iter((torch.cat(flat) if is_most else where).split([len(f) for f in flat]))
    rows, first = room(B * n * E).view(B * n, E), 0
    for some, num in zip(uses, num_samples, strict=True):
        starts = n * torch.arange(first, first + num, device=rows.device)
        for _, values in some:
            at = next(places).view(num, -1) + starts[:, None]
            rows.index_add_(0, at.flatten(), values.flatten(0, 1))
        first += num
    return Part(rows.view(B, n * E), columns, None if is_most else words)
