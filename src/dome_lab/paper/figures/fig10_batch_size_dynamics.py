"""Training dynamics on CIFAR-10 at several batch sizes, with and without the filter.

Claims: as fig01, at every batch size. The runs are among fig09's.

Scale cpu: fig09's runs at B = 4, 64, 256 and 1,000; no cost of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim
from dome_lab.paper.dynamics import draw_panels, judge_convergence, judge_fraction
from dome_lab.paper.figures import fig01_cifar10_dynamics as fig01
from dome_lab.paper.figures import fig09_batch_size_accuracy as fig09
from dome_lab.paper.figures.fig09_batch_size_accuracy import Config
from dome_lab.paper.rows import Row
from dome_lab.paper.statistics import distinct, select

SCORE = "test_accuracy"


def _rows_of(config: Config, *batch_sizes: int) -> Config:
    """fig09's settings at these batch sizes alone."""
    shown = tuple(pair for pair in config.epochs if pair[0] in batch_sizes)
    return replace(config, epochs=shown)


SCALES = {
    "paper": _rows_of(fig09.SCALES["paper"], 4, 64, 256, 2500, 10000),
    "cpu": _rows_of(fig09.SCALES["cpu"], 4, 64, 256, 1000),
    "smoke": fig09.SCALES["smoke"],
}
runs = fig09.runs
compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss, fraction and accuracy by epoch, a row a batch size."""
    return draw_batches(
        rows, drawing.scale_note(rows, fig01.PAPER, varied=["batch_size"])
    )


def draw_batches(rows: Sequence[Row], note: str) -> Figure:
    """The same, with what is to be said of the settings."""
    groups = by_batch_size(rows)
    figure, grid = drawing.canvas(len(groups), 3, drawing.PAGE, 0.5 + 1.7 * len(groups))
    for axes, (name, group) in zip(grid, groups.items(), strict=True):
        draw_panels(axes, group, SCORE)
        drawing.name_row(axes[0], name)
    for column in zip(*grid, strict=True):
        drawing.same_height(column)
    drawing.add_title(figure, rows, grid[0][0])
    drawing.add_note(figure, drawing.statistics_note(rows), note)
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Convergence, and whether the fraction follows the loss, at every batch size."""
    groups = {f"{name}: ": group for name, group in by_batch_size(rows).items()}
    return [
        *judge_convergence("fig10", groups, SCORE),
        *judge_fraction("fig10", groups),
    ]


def by_batch_size(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each batch size by its name."""
    sizes = distinct(rows, "batch_size")
    return {f"B = {size:,g}": select(rows, batch_size=size) for size in sizes}
