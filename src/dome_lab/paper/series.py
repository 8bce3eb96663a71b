"""Rows as curves and end values, one a seed.

Shapes: S seeds, E epochs. What a row has no number for (None) is NaN here.
"""

import math
from collections.abc import Sequence

import numpy as np

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Value
from dome_lab.paper.statistics import Array

Curves = dict[int, Array]  # the values of a column by epoch, shape (E,), by seed


def select(rows: Sequence[Row], **columns: Value) -> list[Row]:
    """The rows that have these values in these columns."""
    wanted = columns.items()
    return [row for row in rows if all(row[name] == value for name, value in wanted)]


def distinct(rows: Sequence[Row], column: str) -> list[float]:
    """The numbers in a column, sorted, each once."""
    return sorted({number(row, column) for row in rows if row[column] is not None})


def curves(rows: Sequence[Row], column: str) -> Curves:
    """How a column went in the runs of each seed, epoch by epoch."""
    ordered = sorted(rows, key=lambda row: (number(row, "seed"), number(row, "epoch")))
    found: dict[int, list[float]] = {}
    for row in ordered:
        found.setdefault(int(number(row, "seed")), []).append(number(row, column))
    return {seed: np.asarray(values) for seed, values in found.items()}


def stacked(runs: Curves) -> Array:
    """The curves of all seeds one below the other, shape (S, E)."""
    return np.stack(list(runs.values()))


def averages(rows: Sequence[Row], column: str) -> dict[int, float]:
    """Mean over the epochs of each seed: the area under its curve."""
    return {seed: float(run.mean()) for seed, run in curves(rows, column).items()}


def ends(rows: Sequence[Row], column: str) -> dict[int, float]:
    """The value after the last epoch of each seed."""
    return {seed: float(run[-1]) for seed, run in curves(rows, column).items()}


def number(row: Row, column: str) -> float:
    """A number of a row, NaN for None."""
    value = row[column]
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number in column {column}, got {value!r}")
    return float(value)
