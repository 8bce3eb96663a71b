"""A table of words, for the screen and for a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class TextTable:
    """Headings and rows of text.

    Attributes:
        title: What the numbers are.
        headings: One a column; the first column is words, the others are numbers.
        rows: As many texts as there are headings, each.
        notes: Sentences below it.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as Markdown, title above and notes below."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [_line(cells) for cells in (self.headings, rule, *self.rows)]
        below = "".join(f"\n{note}\n" for note in self.notes)
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n" + below

    def rich(self) -> Table:
        """The table for a terminal."""
        from rich import box
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def milliseconds(seconds: float) -> str:
    """A duration with three digits; in seconds from one upwards."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """A share, in whole per cent; tenths below ten."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
