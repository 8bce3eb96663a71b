"""The demo's picture: accuracy and loss by epoch, and final accuracy by rate."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dome_lab.paper.comparison import Comparison, curve
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.statistics import Interval
from dome_lab.report.demo_text import ARM_NAMES, LEARNING_RATES, costs, rate_name

# Two of Okabe and Ito's colours, told apart with any colour vision, and two markers.
COLOURS = {PLAIN: "#D55E00", FILTERED: "#0072B2"}
MARKERS = {PLAIN: "s", FILTERED: "o"}
GREY = "#555555"
LABEL_HEIGHT = 0.13  # of an axis, two lines of text
TITLE = {"loc": "left", "fontsize": 17}


def draw(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> Figure:
    """The picture, 16 by 7 inches at 100 dots."""
    figure = Figure(figsize=(16, 7), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    accuracy, loss, by_rate = figure.subplots(
        1, 3, gridspec_kw={"width_ratios": (1, 1, 1.15)}
    )
    harshest = comparisons[-1]
    _draw_curves(accuracy, rows, harshest.rate, "test_accuracy", " %")
    _draw_curves(loss, rows, harshest.rate, "train_loss", "")
    _draw_by_rate(by_rate, comparisons)
    where = "no compression" if harshest.rate is None else f"rate {harshest.rate:,.0f}"
    accuracy.set_title(f"Test accuracy (%), {where}", **TITLE)
    loss.set_title(f"Training loss, {where}", **TITLE)
    by_rate.set_title("Final test accuracy (%) by rate", **TITLE)
    for axes in (accuracy, loss, by_rate):
        _style(axes)
    title = headline(harshest)
    size = min(24, 1800 / len(title))  # the longest one still fits
    figure.suptitle(title, x=0.02, ha="left", fontsize=size, weight="bold")
    figure.text(0.02, 0.87, _subtitle(rows, comparisons), fontsize=14, color=GREY)
    figure.subplots_adjust(left=0.045, right=0.985, top=0.77, bottom=0.12, wspace=0.14)
    return figure


def headline(comparison: Comparison) -> str:
    """What the picture shows at its harshest rate, in a line."""
    arms, rate = comparison.arms, comparison.rate
    plain, filtered = (100 * arms[a].accuracy.mean for a in (PLAIN, FILTERED))
    share = comparison.loss_change.mean / arms[PLAIN].train_loss.mean
    loss = {
        1: f"{100 * share:.0f} % higher loss",
        0: "no clear change in loss",
        -1: f"{-100 * share:.0f} % lower loss",
    }
    accuracy = {
        1: f"accuracy up from {plain:.0f} to {filtered:.0f} %",
        0: "no clear change in accuracy",
        -1: f"accuracy down from {plain:.0f} to {filtered:.0f} %",
    }
    where = "uncompressed" if rate is None else f"compressed {rate:,.0f}-fold"
    return (
        f"Gradients {where}: with the filter {loss[comparison.loss_change.sign]}, "
        f"{accuracy[comparison.accuracy_gain.sign]}"
    )


def _subtitle(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> str:
    num_seeds = len({row["seed"] for row in rows})
    return (
        f"ResNet-8 on digits, Adam, Gaussian sketch; mean of {num_seeds} seeds, 95 % t "
        f"intervals; with the filter an epoch takes {costs(comparisons)} times as long."
        f"\n{LEARNING_RATES}"
    )


def _draw_curves(
    axes: Axes, rows: Sequence[Row], rate: float | None, column: str, unit: str
) -> None:
    ends: dict[str, float] = {}
    scale, most = (100, 100.0) if unit else (1, math.inf)
    for arm in (PLAIN, FILTERED):
        line = curve(rows, arm, rate, column)
        mean = [scale * v.mean for v in line.values]
        axes.plot(line.epochs, mean, color=COLOURS[arm], linewidth=3)
        axes.fill_between(
            line.epochs,
            [max(0.0, scale * v.low) for v in line.values],
            [min(most, scale * v.high) for v in line.values],
            color=COLOURS[arm],
            alpha=0.15,
            linewidth=0,
        )
        ends[arm] = mean[-1]
    last = line.epochs[-1]
    axes.set_xlim(0, 1.42 * last)
    axes.set_ylim(0, 100 if unit else None)
    axes.spines["bottom"].set_bounds(0, last)
    axes.set_xticks(range(0, last + 1, max(1, round(last / 6))))
    axes.set_xlabel("epoch")
    _label_ends(axes, 1.03 * last, ends, unit)


def _label_ends(axes: Axes, x: float, ends: dict[str, float], unit: str) -> None:
    """Write each arm's name and last value right of its line, never overlapping."""
    low, high = axes.get_ylim()
    apart = LABEL_HEIGHT * (high - low)
    spread = max(abs(ends[FILTERED] - ends[PLAIN]), apart) / 2
    middle = min(sum(ends.values()) / 2, high - spread - apart / 2)
    top = FILTERED if ends[FILTERED] >= ends[PLAIN] else PLAIN
    for arm, value in ends.items():
        axes.text(
            x,
            middle + (spread if arm == top else -spread),
            f"{ARM_NAMES[arm]}\n{value:.{0 if unit else 2}f}{unit}",
            color=COLOURS[arm],
            fontsize=15,
            weight="bold",
            va="center",
            linespacing=1.0,
        )


def _draw_by_rate(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    positions = range(len(comparisons))
    for arm, shift in ((PLAIN, -0.04), (FILTERED, 0.04)):
        results = [c.arms[arm].accuracy for c in comparisons]
        _draw_line(axes, positions, results, shift, COLOURS[arm], MARKERS[arm])
    timed = [c.timed.accuracy for c in comparisons if c.timed]
    if len(timed) == len(comparisons):
        _draw_line(axes, positions, timed, 0.12, GREY, "^")
        axes.plot([], [], color=GREY, marker="^", label="with filter, as many seconds")
        axes.legend(loc="lower left", frameon=False, fontsize=13)
    labels = [rate_name(c.rate) for c in comparisons]
    axes.set_xticks(list(positions), labels)
    axes.set_xlim(-0.25, len(comparisons) - 0.05)
    axes.set_ylim(None, 101)  # room for the marker of a point near 100
    axes.spines["bottom"].set_bounds(-0.25, len(comparisons) - 0.75)
    axes.set_xlabel("compression rate")
    ends = {arm: 100 * comparisons[-1].arms[arm].accuracy.mean for arm in COLOURS}
    _label_ends(axes, len(comparisons) - 0.82, ends, " %")


def _draw_line(
    axes: Axes,
    positions: Sequence[int],
    results: Sequence[Interval],
    shift: float,
    colour: str,
    marker: str,
) -> None:
    """Accuracies in per cent, with intervals that end at 0 and 100."""
    mean = [100 * r.mean for r in results]
    below = [m - max(0.0, 100 * r.low) for m, r in zip(mean, results, strict=True)]
    above = [min(100.0, 100 * r.high) - m for m, r in zip(mean, results, strict=True)]
    axes.errorbar(
        [p + shift for p in positions],
        mean,
        yerr=(below, above),
        color=colour,
        marker=marker,
        markersize=11,
        linewidth=3,
        elinewidth=2,
        capsize=6,
    )


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=14, color=GREY, labelcolor=GREY)
    axes.xaxis.label.set(fontsize=14, color=GREY)
