"""Test accuracy on CIFAR-10 by batch size, with and without the filter.

Each point is at the epoch that is best after averaging over seeds. Claim: filtering
costs no accuracy at any batch size. A line joins batch sizes that were trained for as
many epochs.

Scale cpu: fig01's images, B = 4, 16 (fig01's), 64, 256 and 1,000 for 3, 10, 8, 8 and 8
epochs, of which the first 8 count, 10 seeds. Measured: 37 minutes for three of them,
one run after the other, fig01's among them, on a machine that did other work too.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import draw_points
from dome_lab.paper.dynamics import SCORE_MARGIN, both_arms
from dome_lab.paper.figures import fig01_cifar10_dynamics as fig01
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.statistics import curves, distinct, number, select, stacked


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: a run of it, batch sizes with epochs, number of seeds."""

    run: Run = fig01.PAPER
    epochs: tuple[tuple[int, int], ...] = tuple(
        (batch_size, 50) for batch_size in (4, 16, 64, 256, 1000, 2500, 10000)
    )
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=fig01.SCALES["cpu"].run,
        epochs=((4, 3), (16, 10), (64, 8), (256, 8), (1000, 8)),
        num_seeds=10,
    ),
    "smoke": Config(
        run=fig01.SCALES["smoke"].run, epochs=((16, 2), (48, 2)), num_seeds=2
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Both arms of every batch size and seed; B = 16 is fig01's."""
    return [
        run
        for batch_size, epochs in config.epochs
        for run in both_arms(
            replace(config.run, batch_size=batch_size, epochs=epochs), config.num_seeds
        )
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the best epoch by batch size."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 3.1)
    sizes = distinct(rows, "batch_size")
    length = {size: num_epochs(rows, size) for size in sizes}
    for arm in (PLAIN, FILTERED):
        shift = 0.95 if arm == PLAIN else 1.05  # so that bars can be told apart
        for epochs in sorted(set(length.values()), reverse=True):
            joined = [size for size in sizes if length[size] == epochs]
            is_longest = epochs == max(length.values())
            draw_points(
                axes,
                [shift * size for size in joined],
                [list(best_epoch(rows, arm, size).values()) for size in joined],
                drawing.COLOURS[arm],
                label=drawing.ARM_NAMES[arm] if is_longest else None,
                linestyle=drawing.DASHES[arm],
                marker=drawing.MARKERS[arm],
            )
    drawing.log_below(axes, sizes, {})
    axes.tick_params(axis="x", labelrotation=45)
    drawing.label(axes, "batch size", "test accuracy, best epoch")
    drawing.add_title(figure, rows, axes)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        "Epochs: "
        + ", ".join(f"{n} at B = {size:,g}" for size, n in length.items())
        + ".",
        drawing.scale_note(rows, fig01.PAPER, varied=["batch_size", "epochs"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """No batch size at which the filter costs accuracy."""
    findings = [
        paired(
            f"B = {size:g}: change of accuracy",
            best_epoch(rows, FILTERED, size),
            best_epoch(rows, PLAIN, size),
            low=-SCORE_MARGIN,
        )
        for size in distinct(rows, "batch_size")
    ]
    return [
        claim(
            "fig09",
            "no loss of accuracy at any batch size",
            "At every batch size the test accuracy with the filter, best epoch of the "
            f"mean over seeds, is at most {SCORE_MARGIN} below that without.",
            findings,
        )
    ]


def num_epochs(rows: Sequence[Row], batch_size: float) -> int:
    """How many epochs of a batch size count: no more than most of the others have.

    fig01's runs, which are B = 16, may be longer; without a schedule they begin with
    the shorter ones.
    """
    lengths = [
        int(number(select(rows, batch_size=size)[0], "epochs"))
        for size in distinct(rows, "batch_size")
    ]
    own = int(number(select(rows, batch_size=batch_size)[0], "epochs"))
    return min(own, statistics.mode(lengths))


def best_epoch(rows: Sequence[Row], arm: str, batch_size: float) -> dict[int, float]:
    """Accuracy of each seed at the epoch that is best on average."""
    last = num_epochs(rows, batch_size)
    mine = select(rows, arm=arm, batch_size=batch_size)
    mine = [row for row in mine if number(row, "epoch") <= last]
    found = curves(mine, "test_accuracy")
    best = int(stacked(found).mean(axis=0).argmax())
    return {seed: float(run[best]) for seed, run in found.items()}
