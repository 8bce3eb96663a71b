"""Values at the end of training, drawn: seeds as dots, mean and t interval as a bar."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dome_lab.paper.rows import Row
from dome_lab.paper.series import ends
from dome_lab.paper.statistics import Array, Band, student_band

SEED_DOT: dict[str, Any] = {
    "linestyle": "none",
    "marker": ".",
    "markersize": 4,
    "alpha": 0.5,
    "zorder": 2,
}

Seeds = Sequence[float]  # one value a seed


def end_values(rows: Sequence[Row], column: str = "test_accuracy") -> list[float]:
    """The value after the last epoch of each seed."""
    return list(ends(rows, column).values())


def point_band(values: Sequence[Seeds]) -> Band:
    """Means of several points and their 95 % t intervals."""
    bands = [student_band(np.asarray(seeds)[:, None]) for seeds in values]
    return Band(
        np.concatenate([band.mean for band in bands]),
        np.concatenate([band.low for band in bands]),
        np.concatenate([band.high for band in bands]),
    )


def draw_points(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[Seeds],
    colour: str,
    **style: Any,  # noqa: ANN401 - matplotlib's own
) -> None:
    """Points beside each other.

    Args:
        axes: Where.
        x: Where each point is.
        values: The seeds of each point.
        colour: Of all of them.
        **style: Of the line through the means.
    """
    band = point_band(values)
    for place, seeds in zip(x, values, strict=True):
        axes.plot([place] * len(seeds), seeds, color=colour, **SEED_DOT)
    bars = [band.mean - band.low, band.high - band.mean]
    look: dict[str, Any] = {"markersize": 3.5, "linewidth": 1.1, "capsize": 2}
    axes.errorbar(
        x, band.mean, yerr=bars, color=colour, elinewidth=0.8, **(look | style)
    )


def draw_lines(
    axes: Axes,
    values: Sequence[Seeds],
    y: Array,
    colours: Sequence[str],
    name: str | None = None,
) -> None:
    """Points one below the other, each on a line of its own."""
    band = point_band(values)
    axes.hlines(y, band.low, band.high, colors=colours, linewidth=1.2)
    axes.scatter(band.mean, y, c=colours, s=14, zorder=3, label=name)
    for height, seeds, colour in zip(y, values, colours, strict=True):
        axes.plot(seeds, [height] * len(seeds), color=colour, **SEED_DOT)
