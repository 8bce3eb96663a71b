"""Rows of a loop of one's own: read from JSON lines or CSV, and given our names.

A run whose rows all say ``filtered: false``, as ``Recorder.record(None, ...)`` writes
them, or that is named as the baseline, is the arm without a filter.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Value
from dome_lab.report.labels import FILTERED

# What others call the columns that arms are compared by; the first one there counts.
NAMES = {
    "test_accuracy": ("accuracy", "val_accuracy", "acc"),
    "train_loss": ("loss",),
    "test_loss": ("val_loss", "eval_loss"),
    "total_bytes": ("total_bytes_sent", "bytes"),
}


def csv_rows(path: Path) -> list[Row]:
    """The rows of a CSV file: numbers and truth values as such, empty cells as None."""
    text = path.read_text(encoding="utf-8-sig")
    return [
        {name: _value(cell) for name, cell in row.items() if name is not None}
        for row in csv.DictReader(io.StringIO(text))
    ]


def renamed(row: Row) -> Row:
    """A row with our names for what arms are compared by."""
    row = dict(row)
    for ours, theirs in NAMES.items():
        found = [name for name in theirs if name in row]
        if ours not in row and found:
            row[ours] = row.pop(found[0])
    return row


def timed(rows: Sequence[Row]) -> list[Row]:
    """Rows of a run whose ``elapsed`` is counted from its first one.

    It is the recorder's, which may have recorded other runs before; in a run that was
    resumed it begins at zero again.
    """
    found, total, last = [], 0.0, None
    for row in rows:
        now = row.get("elapsed")
        if isinstance(now, int | float):
            if last is not None:
                total += now - last if now >= last else now
            last = now
        known = {} if last is None else {"elapsed": total}
        found.append({**row, **known})
    return found


def is_baseline(name: str, rows: Sequence[Row], baseline: str | None) -> bool:
    """Whether a run is the arm without a filter."""
    if baseline is not None:
        return name == baseline
    return all(row.get(FILTERED) is False for row in rows)


def _value(cell: str | None) -> Value:
    if not cell:
        return None
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
