"""Accuracy under ever harsher compression: how it is drawn and judged."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, Finding, claim, paired
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.series import distinct, ends, select
from dome_lab.paper.statistics import Band, student_band

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


def draw_tolerance(axes: Axes, rows: Sequence[Row], confidence: float) -> None:
    """Final test accuracy by rate; no compression stands apart at the left."""
    rates = distinct(rows, "rate")
    none = min(rates) / 4
    for arm in (PLAIN, FILTERED):
        mine = select(rows, arm=arm)
        style = {"marker": drawing.MARKERS[arm], "markersize": 3.5}
        bands = [end_band(select(mine, rate=rate), confidence) for rate in rates]
        drawing.draw_band(axes, rates, joined(bands), arm, **style)
        if uncompressed := select(mine, rate=None):
            shift = 0.94 if arm == PLAIN else 1.06
            _draw_point(axes, shift * none, end_band(uncompressed, confidence), arm)
    drawing.log_below(axes, [none, *_decades(rates)], {none: "none"})
    drawing.label(axes, "compression rate d/m", "test accuracy")


def end_band(rows: Sequence[Row], confidence: float) -> Band:
    """Test accuracy after the last epoch, as a band of one point."""
    values = list(ends(rows, "test_accuracy").values())
    return student_band(np.array(values)[:, None], confidence)


def joined(bands: Sequence[Band]) -> Band:
    """The points of several bands in one."""
    return Band(
        np.concatenate([band.mean for band in bands]),
        np.concatenate([band.low for band in bands]),
        np.concatenate([band.high for band in bands]),
    )


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


def _draw_point(axes: Axes, x: float, band: Band, arm: str) -> None:
    axes.errorbar(
        [x],
        band.mean,
        yerr=[band.mean - band.low, band.high - band.mean],
        color=drawing.COLOURS[arm],
        marker=drawing.MARKERS[arm],
        markersize=3.5,
        linewidth=1,
        capsize=2,
    )


def _decades(rates: Sequence[float]) -> list[float]:
    """The powers of ten among the rates, or all if there are none."""
    return [r for r in rates if np.log10(r).is_integer()] or list(rates)
