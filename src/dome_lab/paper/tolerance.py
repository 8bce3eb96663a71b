"""Accuracy under ever harsher compression: how it is drawn and judged."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, Finding, claim, paired
from dome_lab.paper.drawing import draw_points, end_values
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.statistics import distinct, ends, select

EQUAL = 0.02  # accuracies this near count as similar
LOW, HIGH = 10, 100  # rates up to the first are low, from the second on high

Rates = tuple[float | None, ...]


def across_rates(run: Run, rates: Rates, num_seeds: int) -> list[Run]:
    """With the filter and without, at every rate, for every seed."""
    return [
        replace(run, seed=seed, rate=rate, rank=rank)
        for rank in (run.rank, None)
        for seed in range(num_seeds)
        for rate in rates
    ]


def draw_tolerance(axes: Axes, rows: Sequence[Row]) -> None:
    """Final test accuracy by rate; no compression stands apart at the left."""
    rates = distinct(rows, "rate")
    none = min(rates) / 4
    # Beside each other: at "none" both arms are often the same.
    for arm, shift in ((PLAIN, 0.93), (FILTERED, 1.07)):
        mine = select(rows, arm=arm)
        look: dict[str, Any] = {"marker": drawing.MARKERS[arm]}
        draw_points(
            axes,
            [shift * rate for rate in rates],
            [end_values(select(mine, rate=rate)) for rate in rates],
            drawing.COLOURS[arm],
            label=drawing.ARM_NAMES[arm],
            linestyle=drawing.DASHES[arm],
            **look,
        )
        if uncompressed := select(mine, rate=None):
            values = end_values(uncompressed)
            draw_points(axes, [shift * none], [values], drawing.COLOURS[arm], **look)
    drawing.log_below(axes, [none, *_decades(rates)], {none: "none"})
    drawing.label(axes, "compression rate d/m", "test accuracy")


def judge_tolerance(figure: str, rows: Sequence[Row], where: str = "") -> list[Claim]:
    """Similar at every low rate, and ahead at each high one.

    Args:
        figure: Short name of the figure.
        rows: The rows of one task.
        where: What is put before the names of the claims, such as "CIFAR-10: ".
    """
    rates = distinct(rows, "rate")
    low = [None, *(rate for rate in rates if rate <= LOW)]
    return [
        claim(
            figure,
            f"{where}similar at low compression",
            f"Without compression and at rates up to {LOW}, test accuracy with and "
            f"without the filter differs by less than {EQUAL}.",
            [_gain(rows, rate, -EQUAL, EQUAL) for rate in low],
        ),
        *(
            claim(
                figure,
                f"{where}ahead at rate {rate:,g}",
                f"At rate {rate:,g} the filter adds to test accuracy.",
                [_gain(rows, rate, 0, math.inf)],
            )
            for rate in rates
            if rate >= HIGH
        ),
    ]


def _gain(rows: Sequence[Row], rate: float | None, low: float, high: float) -> Finding:
    return paired(
        "gain uncompressed" if rate is None else f"gain at rate {rate:,g}",
        ends(select(rows, rate=rate, arm=FILTERED), "test_accuracy"),
        ends(select(rows, rate=rate, arm=PLAIN), "test_accuracy"),
        low,
        high,
    )


def _decades(rates: Sequence[float]) -> list[float]:
    """The powers of ten among the rates, or all if there are none."""
    return [r for r in rates if np.log10(r).is_integer()] or list(rates)
