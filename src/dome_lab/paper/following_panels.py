"""Training loss and fraction of unfiltered runs, one above the other."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN
from dome_lab.paper.series import curves, stacked
from dome_lab.paper.statistics import student_band


def draw_following(
    groups: Mapping[str, Sequence[Row]],
    rows: Sequence[Row],
    varied: Sequence[str] = (),
) -> Figure:
    """Training loss above, the fraction below it, a column a group.

    Args:
        groups: Rows by what they are called, each part of it in a line of its own.
        rows: All of them.
        varied: Columns in which groups differ, as their names say.
    """
    num = len(groups)
    figure, lines = drawing.canvas(2, num, max(drawing.COLUMN, 1.75 * num), 3.6)
    for place, (name, mine) in enumerate(groups.items()):
        for line, (column, title) in zip(
            lines,
            (("train_loss", "training loss"), ("fraction", "fraction")),
            strict=True,
        ):
            values = stacked(curves(mine, column))
            epochs = np.arange(1, values.shape[1] + 1)
            axes = line[place]
            axes.plot(epochs, values.T, color=drawing.COLOURS[PLAIN], **drawing.SEED)
            seen = axes.get_ylim()
            drawing.draw_band(axes, epochs, student_band(values), PLAIN)
            axes.set_ylim(seen)
            above = name.replace(", ", "\n") if column == "train_loss" else ""
            drawing.label(axes, "epoch", title if place == 0 else "", above)
            drawing.epochs_below(axes)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows),
        drawing.extension_note(rows, varied),
    )
    return figure
