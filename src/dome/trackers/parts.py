"""Rows (B, D) without the columns that are zero in all of them.

A batch of texts uses few of the words that an embedding has. All others have columns
of zeros in every sample: these are left out, and what an update asks of D numbers is
asked of the words in the batch.

Shapes: G (B, D) samples, S (D, K) tall. An embedding of V words has V·E columns of G
and rows of S, of which n words' are kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Some columns of rows.

    Attributes:
        rows: What is kept of these columns, shape (B, n·E); all of them, (B, ·), if
            there are no words.
        columns: Which of the D columns it is about.
        words: Which words of an embedding are kept, in order, shape (n,); all others
            are zero.
    """

    rows: Tensor
    columns: slice
    words: Tensor | None = None

    def of(self, S: Tensor) -> Tensor:
        """The rows of a tall matrix that meet what is kept: a copy if that is words."""
        own = S[self.columns]
        if self.words is None:
            return own
        if not len(self.words):
            return own[:0]
        return self._by_word(own).index_select(0, self.words).view(-1, S.shape[1])

    def put(self, S: Tensor, values: Tensor) -> None:
        """Write these rows of a tall matrix, in place."""
        own = S[self.columns]
        if self.words is None:
            own.copy_(values)
        elif len(self.words):
            by_word = self._by_word(own)
            by_word.index_copy_(0, self.words, values.view(len(self.words), -1))

    def others(self, S: Tensor, num: int) -> Iterator[Tensor]:
        """The rows that meet what is left out, about ``num`` at a time."""
        own = S[self.columns]
        if self.words is None or not len(self.words):
            yield from () if self.words is None else own.split(num)
            return
        by_word = self._by_word(own)
        left_out = torch.ones(len(by_word), dtype=torch.bool, device=S.device)
        left_out[self.words] = False
        for words in left_out.nonzero()[:, 0].split(max(num // self._size, 1)):
            yield by_word.index_select(0, words).view(-1, S.shape[1])

    def chosen_from(self, G: Tensor) -> "Part":
        """The same columns and words of other rows (B, D)."""
        own = G[:, self.columns]
        if self.words is None or not len(self.words):
            return self._replace(rows=own if self.words is None else own[:, :0])
        by_word = own.unflatten(1, (-1, self._size))
        return self._replace(rows=by_word.index_select(1, self.words).flatten(1))

    def within(self, block: slice) -> "Part | None":
        """What it has of some columns, counted from their first; None for nothing.

        Words are of one block or of another.
        """
        start = max(self.columns.start, block.start)
        stop = min(self.columns.stop, block.stop)
        if start >= stop:
            return None
        columns = slice(start - block.start, stop - block.start)
        if self.words is not None:
            return Part(self.rows, columns, self.words)
        first = self.columns.start
        return Part(self.rows[:, start - first : stop - first], columns)

    def ids(self) -> Tensor:
        """Which of the D columns are kept words', in order."""
        if self.words is None or not len(self.words):
            return torch.zeros(0, dtype=torch.int64, device=self.rows.device)
        within = torch.arange(self._size, device=self.rows.device)
        first = self.columns.start
        return (first + self.words[:, None] * self._size + within).flatten()

    def without_rows(self) -> "Part":
        """Its columns and words alone."""
        return self._replace(rows=self.rows[:0])

    @property
    def _size(self) -> int:
        """E, numbers of a word."""
        return self.rows.shape[1] // (1 if self.words is None else len(self.words))

    def _by_word(self, own: Tensor) -> Tensor:
        """Rows of a tall matrix, one word's side by side, shape (V, E·K)."""
        return own.view(-1, self._size * own.shape[1])


def pieces(parts: Iterable[Part], num: int) -> Iterator[Part]:
    """The same in parts of about ``num`` columns."""
    for rows, columns, words in parts:
        if words is None:
            for first in range(0, rows.shape[1], num):
                some = rows[:, first : first + num]
                start = columns.start + first
                yield Part(some, slice(start, start + some.shape[1]))
        elif len(words):
            size = rows.shape[1] // len(words)
            num_words = max(num // size, 1)
            few = rows.split(num_words * size, dim=1)
            for some, those in zip(few, words.split(num_words), strict=True):
                yield Part(some, columns, those)


@dataclass(frozen=True, slots=True)
class PartialRows:
    """A batch of samples without the columns that are zero in all of them.

    Attributes:
        parts: At least one; all D columns, in order.
    """

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.parts[0].rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, D)."""
        return len(self), self.parts[-1].columns.stop

    @property
    def dtype(self) -> torch.dtype:
        """Of all parts."""
        return self.parts[0].rows.dtype

    def within(self, columns: slice) -> "PartialRows":
        """The samples of some columns alone."""
        found = [part.within(columns) for part in self.parts]
        parts = [part for part in found if part is not None]
        # A worker may hold nothing of a layer.
        nothing = Part(self.parts[0].rows[:, :0], slice(0, 0))
        return PartialRows(tuple(parts or [nothing]))

    def total(self) -> Tensor:
        """The sum of the rows, shape (D,)."""
        sums = [
            part._replace(rows=part.rows.sum(0, keepdim=True)) for part in self.parts
        ]
        return PartialRows(tuple(sums)).written_out()[0]

    def of_columns(self, kept: Tensor) -> Tensor:
        """Some columns (n,) in order, all that are kept here among them, (B, n)."""
        G = self.parts[0].rows.new_zeros(len(self), len(kept))
        for part in self.parts:
            if part.words is None:
                first = int(torch.searchsorted(kept, part.columns.start))
                G[:, first : first + part.rows.shape[1]] = part.rows
            else:
                G[:, torch.searchsorted(kept, part.ids())] = part.rows
        return G

    def written_out(self) -> Tensor:
        """All columns, shape (B, D)."""
        G = self.parts[0].rows.new_zeros(self.shape)
        for rows, columns, words in self.parts:
            own = G[:, columns]
            if words is None:
                own.copy_(rows)
            elif len(words):
                by_word = rows.view(len(rows), len(words), -1)
                own = own.view(len(own), -1, by_word.shape[2])
                own.index_copy_(1, words, by_word)
        return G


def parts_of(rows: Tensor | PartialRows) -> tuple[Part, ...]:
    """Rows as parts; a matrix is one."""
    if isinstance(rows, Tensor):
        return (Part(rows, slice(0, rows.shape[1])),)
    return rows.parts
