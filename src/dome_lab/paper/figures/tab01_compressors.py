"""MNIST accuracy after each compressor at matched bits, with and without the filter.

Beyond the paper, on fig03's question: is the filter of use to other compressors than
the Gaussian sketch? At rate 15, about two bits a parameter, which every compressor can
send; at rate 100, less than a bit, those that can. Each sends the largest message that
the rate allows, what it sends is written beside it; biased ones have error feedback.

Scale cpu: as ext00. Measured: about 40 minutes for two processes, on a machine that did
other work too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.arms import NUMBER_BITS
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import draw_lines, end_values, name_of
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.rows import Row
from dome_lab.paper.run import COMPRESSORS, FILTERED, PLAIN, Run
from dome_lab.paper.statistics import distinct, ends, select

ALL_CAN, FEW_CAN = 15.0, 100.0
SPARSE = ("gaussian", "hadamard", "randomk", "randomk+feedback", "topk+feedback")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: fig03's run, compressors by rate, and number of seeds."""

    run: Run = fig03.PAPER
    compressors: tuple[tuple[float, tuple[str, ...]], ...] = (
        (ALL_CAN, COMPRESSORS),
        (FEW_CAN, SPARSE),
    )
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(run=fig03.SMALL, num_seeds=3),
    "smoke": Config(
        run=fig03.SCALES["smoke"].run,
        compressors=((ALL_CAN, COMPRESSORS[-2:]), (FEW_CAN, SPARSE[-1:])),
        num_seeds=2,
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Both arms of every compressor, rate and seed."""
    return [
        replace(config.run, rate=rate, compressor=name, seed=seed, rank=rank)
        for rate, names in config.compressors
        for name in names
        for rank in (config.run.rank, None)
        for seed in range(config.num_seeds)
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end of both arms by compressor, a panel a rate."""
    rates = distinct(rows, "rate")
    figure, (panels,) = drawing.canvas(1, len(rates), drawing.PAGE, 3.4)
    for axes, rate in zip(panels, rates, strict=True):
        here = select(rows, rate=rate)
        names = [name for name in COMPRESSORS if select(here, compressor=name)]
        height = np.arange(len(names), 0.0, -1)
        for arm, shift in ((PLAIN, -0.13), (FILTERED, 0.13)):
            mine = select(here, arm=arm)
            values = [end_values(select(mine, compressor=name)) for name in names]
            colours = [drawing.COLOURS[arm]] * len(names)
            draw_lines(axes, values, height + shift, colours, drawing.ARM_NAMES[arm])
        axes.set_ylim(0.5, len(names) + 0.5)
        axes.set_yticks(height, [_label(here, name) for name in names])
        drawing.label(axes, "test accuracy", "", f"rate {rate:,g}")
    drawing.add_title(figure, rows, panels[0])
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        f"In brackets: how many times fewer bits than {NUMBER_BITS} a parameter.",
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """For each compressor: the filter does not harm; and whether it adds."""
    return [
        claim(
            "tab01",
            f"{name_of(name)}: the filter helps",
            f"At every rate tried the filter adds to test accuracy after "
            f"{name_of(name)}.",
            [
                paired(
                    f"gain at rate {rate:,g}",
                    ends(select(mine, rate=rate, arm=FILTERED), "test_accuracy"),
                    ends(select(mine, rate=rate, arm=PLAIN), "test_accuracy"),
                    0.0,
                    math.inf,
                )
                for rate in distinct(mine, "rate")
            ],
        )
        for name in COMPRESSORS
        if (mine := select(rows, compressor=name))
    ]


def _label(rows: Sequence[Row], name: str) -> str:
    """A compressor and how many times fewer bits it sends."""
    row = select(rows, compressor=name)[0]
    factor = row.get("times_fewer_bits") or row["rate"]
    return f"{name_of(name)} ({factor:.0f})"
