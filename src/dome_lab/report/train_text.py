"""One run on screen: a line an epoch."""

from collections.abc import Callable

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Value

# Heading, column of the row, and how a number is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("epoch", "epoch", "{:.0f}".format),
    ("train loss", "train_loss", "{:.4f}".format),
    ("test loss", "test_loss", "{:.4f}".format),
    ("accuracy", "test_accuracy", "{:.2%}".format),
    ("macro-F1", "test_macro_f1", "{:.4f}".format),
    ("norm kept", "kept_norm", "{:.3f}".format),
    ("fraction", "fraction", "{:.3f}".format),
    ("seconds", "seconds", "{:.1f}".format),
)


def heading() -> str:
    """The names of the columns."""
    return "  ".join(title for title, _, _ in _COLUMNS)


def line(row: Row) -> str:
    """A row, under the heading; a dash for what is not a number."""
    return "  ".join(
        _cell(row[column], write).rjust(len(title)) for title, column, write in _COLUMNS
    )


def _cell(value: Value, write: Callable[[float], str]) -> str:
    return write(value) if isinstance(value, int | float) else "-"
