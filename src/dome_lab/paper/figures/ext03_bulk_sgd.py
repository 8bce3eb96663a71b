"""SGD, DOME, and SGD without the leading Hessian eigenvectors, on MNIST, and costs.

Beyond the paper: the Bulk-SGD of Song et al. (2024), "Does SGD really happen in tiny
subspaces?", which the paper builds on, beside the filter, with the same model, seeds
and order of samples. The leading C eigenvectors of the Hessian over 500 training
samples are computed anew on every tenth step; DOME removes C² directions, its default,
and C, for a fair comparison.

Scale cpu: a network of linear layers as in ext01, 2,000 training images, B = 32, 8
epochs, 3 seeds. What a step takes is part of the figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.controls import CURVATURE_SAMPLES
from dome_lab.paper.drawing import draw_lines
from dome_lab.paper.dynamics import LOSS_MARGIN, SCORE_MARGIN
from dome_lab.paper.figures import ext01_curvature_alignment as ext01
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.statistics import (
    averages,
    curves,
    ends,
    number,
    select,
    stacked,
    student_band,
)

PAPER = ext01.PAPER
TIME = "processor_seconds"
TICKS = [a * 10**b for b in range(-1, 5) for a in (1, 3)]
CHEAPER = 0.5  # DOME's step against that with the Hessian
SGD, DOME, NARROW, BULK = "SGD", "DOME, k = C²", "DOME, k = C", "Hessian, k = C"
STYLES = dict(zip((SGD, DOME, NARROW, BULK), ("--", "-", "-.", ":"), strict=True))
COLOURS = dict(
    zip(
        (SGD, DOME, NARROW, BULK),
        (drawing.PALETTE[i] for i in (1, 0, 3, 2)),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run, classes C, steps between two eigenspaces, and seeds."""

    run: Run = PAPER
    num_classes: int = 10
    every: int = 10
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(run=ext01.SCALES["cpu"].run, num_seeds=3),
    "smoke": Config(run=ext01.SCALES["smoke"].run, num_classes=3, every=4, num_seeds=2),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Every arm for every seed."""
    run, C = config.run, config.num_classes
    arms = [
        replace(run, rank=None),
        replace(run, rank=C * C),
        replace(run, rank=C),
        replace(run, rank=C, removes="hessian", update_every=config.every),
    ]
    return [replace(arm, seed=s) for arm in arms for s in range(config.num_seeds)]


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss and test accuracy by step, and seconds a step."""
    figure, (panels,) = drawing.canvas(1, 3, drawing.PAGE, 2.9)
    arms = _arms(rows)
    for axes, column, name in zip(
        panels,
        ("train_loss", "test_accuracy"),
        ("training loss", "test accuracy"),
        strict=False,
    ):
        for arm, mine in arms.items():
            values = stacked(curves(mine, column))
            steps = _steps_an_epoch(mine[0]) * np.arange(1, values.shape[1] + 1)
            drawing.draw_line(
                axes,
                steps,
                student_band(values),
                COLOURS[arm],
                linestyle=STYLES[arm],
                label=arm,
            )
        drawing.label(axes, "step", name)
    _draw_costs(panels[2], arms)
    drawing.add_title(figure, rows, panels[0])
    every = next((row["update_every"] for row in arms.get(BULK, [])), "n")
    drawing.add_note(
        figure,
        f"Hessian over at most {CURVATURE_SAMPLES:,} training samples, eigenvectors "
        f"anew on every {every}th step. Time of the processor, one thread.",
        drawing.statistics_note(rows),
        drawing.extension_note(rows, varied=["rank"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Neither arm trains worse than SGD; DOME as well as the Hessian, and cheaper."""
    arms = _arms(rows)
    no_worse = [
        claim(
            "ext03",
            f"{arm}: trains no worse than SGD",
            f"Training loss after the last epoch is at most {LOSS_MARGIN:.0%} above "
            f"that of SGD, and test accuracy at most {SCORE_MARGIN} below.",
            [
                paired(
                    "relative change of the last loss",
                    ends(arms.get(arm, []), "train_loss"),
                    ends(arms.get(SGD, []), "train_loss"),
                    high=LOSS_MARGIN,
                    relative=True,
                ),
                paired(
                    "change of the last test accuracy",
                    ends(arms.get(arm, []), "test_accuracy"),
                    ends(arms.get(SGD, []), "test_accuracy"),
                    low=-SCORE_MARGIN,
                ),
            ],
        )
        for arm in (BULK, DOME, NARROW)
    ]
    alike = claim(
        "ext03",
        "DOME does what removing the Hessian's outliers does",
        "With as many directions, C, test accuracy after the last epoch differs by "
        f"less than {SCORE_MARGIN}.",
        [
            paired(
                "change from Hessian to DOME",
                ends(arms.get(NARROW, []), "test_accuracy"),
                ends(arms.get(BULK, []), "test_accuracy"),
                low=-SCORE_MARGIN,
                high=SCORE_MARGIN,
            )
        ],
    )
    cheaper = claim(
        "ext03",
        "DOME's step is far cheaper",
        f"A step of DOME, k = C², takes less than {CHEAPER:g} times that with the "
        "Hessian, whose eigenvectors are not even computed on every step.",
        [
            paired(
                "relative change of the processor's time",
                averages(arms.get(DOME, []), TIME),
                averages(arms.get(BULK, []), TIME),
                high=CHEAPER - 1,
                relative=True,
            )
        ],
    )
    return [*no_worse, alike, cheaper]


def _arms(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each arm by its name."""
    widest = max((number(row, "rank") for row in rows if row["rank"]), default=math.nan)
    arms = {
        SGD: select(rows, rank=None),
        DOME: [row for row in select(rows, removes="span") if row["rank"] == widest],
        NARROW: [
            row
            for row in select(rows, removes="span")
            if row["rank"] not in (None, widest)
        ],
        BULK: select(rows, removes="hessian"),
    }
    return {name: mine for name, mine in arms.items() if mine}


def _steps_an_epoch(row: Row) -> float:
    return number(row, "num_train") // number(row, "batch_size")


def _draw_costs(axes: Axes, arms: dict[str, list[Row]]) -> None:
    values = {
        arm: np.array(list(averages(mine, TIME).values())) / _steps_an_epoch(mine[0])
        for arm, mine in arms.items()
    }
    height = np.arange(len(arms), 0.0, -1)
    seeds = [(1e3 * v).tolist() for v in values.values()]
    draw_lines(axes, seeds, height, [COLOURS[arm] for arm in arms])
    axes.set_yticks(height, list(arms))
    axes.set_ylim(0.5, len(arms) + 0.5)
    low, high = min(map(min, seeds)), max(map(max, seeds))
    drawing.log_below(axes, [t for t in TICKS if low / 3 < t < 3 * high], {})
    drawing.label(axes, "milliseconds a step", "")
