"""Learning rates chosen for each arm, and comparisons of arms that have their own.

They are chosen on validation samples, by seeds that are never judged. The rates tried
are 1, 3, 10, 30 ... times a power of ten: all of them with the first seed, and the best
two with the others, which decide. Where the best one lies at an end of those tried, the
next one beyond it is tried too.

A case is one task, optimizer and rate. Of the unfiltered arm there are two: after as
many epochs as the filtered one, and, longer, after as many seconds. Without a schedule
a longer run begins with the shorter one, so that where both have one learning rate the
rows of the longer serve both. How long an epoch takes is never compared between runs:
one ``paced`` run trains with and without the filter in turn.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import name_of, subset_name
from dome_lab.paper.figures import Found
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, TEST, VALIDATION, Run, Value
from dome_lab.paper.statistics import (
    Array,
    curves,
    ends,
    number,
    select,
    stacked,
    student_interval,
)

NUM_FINALISTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is tried.

    Attributes:
        rates: Learning rates tried at first, ascending.
        seeds: Of the trials; none of them is judged.
        most_beyond: How many further rates may be tried at either end.
    """

    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    seeds: tuple[int, ...] = (100, 101)
    most_beyond: int = 3


def trial(run: Run, rate: float, seed: int) -> Run:
    """A run with another learning rate and seed, tested on validation samples."""
    return replace(run, lr=rate, seed=seed, split=VALIDATION)


def first_trials(run: Run, grid: Grid) -> list[Run]:
    """What is tried before anything is known."""
    return [trial(run, rate, grid.seeds[0]) for rate in grid.rates]


def search(run: Run, grid: Grid, found: Found, epoch: int) -> float | list[Run]:
    """The best learning rate of a run after some epochs, or trials still wanted.

    Args:
        run: Of any learning rate, seed and split.
        grid: What to try.
        found: The finished runs.
        epoch: After which epoch accuracy counts.
    """
    rates, first, *others = list(grid.rates), *grid.seeds
    while True:
        wanted = [trial(run, rate, first) for rate in rates]
        if not found.keys() >= set(wanted):
            return wanted
        by_first = _accuracies(wanted, found, epoch)
        finalists = sorted(by_first, key=_best_first(by_first))[:NUM_FINALISTS]
        final = [trial(run, rate, seed) for rate in finalists for seed in others]
        if not found.keys() >= set(final):
            return final
        runs = [one for one in [*wanted, *final] if one.lr in finalists]
        accuracies = _accuracies(runs, found, epoch)
        best = min(accuracies, key=_best_first(accuracies))
        beyond = _beyond(best, rates, grid)
        if beyond is None:
            return best
        rates = sorted([*rates, beyond])


def pace_of(paced: Sequence[Row]) -> float:
    """How many unfiltered epochs a filtered one takes: the median of a paced run.

    The processor's seconds of an epoch vary between machines, and with what else a
    machine does. Both epochs of a pair were computed one right after the other.
    """
    return statistics.median(
        number(row, "processor_seconds") / number(row, "plain_seconds") for row in paced
    )


def equal_epochs(epochs: int, pace: float) -> int:
    """How many unfiltered epochs take as long as so many filtered ones."""
    return max(epochs, round(epochs * pace))


def next_rate(rate: float, *, up: bool) -> float:
    """The neighbour of a learning rate among 1, 3, 10, 30 ... times a power of ten."""
    exponent = math.floor(math.log10(rate) + 1e-9)  # log10(1e-3) is below -3
    is_three = round(rate / 10.0**exponent) == 3
    if up:
        return float(f"1e{exponent + 1}" if is_three else f"3e{exponent}")
    return float(f"1e{exponent}" if is_three else f"3e{exponent - 1}")


def _accuracies(runs: Sequence[Run], found: Found, epoch: int) -> dict[float, float]:
    """Mean accuracy after an epoch by learning rate."""
    values: dict[float, list[float]] = {}
    for run in runs:
        (row,) = select(found[run], epoch=epoch)
        values.setdefault(run.lr, []).append(number(row, "test_accuracy"))
    return {rate: math.fsum(some) / len(some) for rate, some in values.items()}


def _best_first(
    accuracies: dict[float, float],
) -> Callable[[float], tuple[float, float]]:
    """Sorts learning rates by accuracy; of equals the smallest is first."""
    return lambda rate: (-accuracies[rate], rate)


def _beyond(best: float, rates: Sequence[float], grid: Grid) -> float | None:
    """The next rate to try if the best is the last one at its end, else None."""
    lower = sum(rate < grid.rates[0] for rate in rates)
    higher = sum(rate > grid.rates[-1] for rate in rates)
    if best == rates[0] and lower < grid.most_beyond:
        return next_rate(best, up=False)
    if best == rates[-1] and higher < grid.most_beyond:
        return next_rate(best, up=True)
    return None


def judge_equal_time(
    figure: str,
    rows: Sequence[Row],
    pace: float,
    score: str,
    where: str = "",
) -> list[Claim]:
    """Whether the filter adds to the score in as many seconds.

    Args:
        figure: Short name of the figure.
        rows: Of both arms, of as many epochs.
        pace: Unfiltered epochs that a filtered one takes.
        score: Column of what is to be high.
        where: Put before the name, such as "rate 100: ".

    Returns:
        One claim; none if no filtered epoch fits into the time.
    """
    filtered, plain = (select(rows, arm=arm) for arm in (FILTERED, PLAIN))
    epochs = int(number(plain[0], "epochs"))
    fitting = math.floor(epochs / pace)
    if not fitting:
        return []
    early = [row for row in filtered if number(row, "epoch") <= fitting]
    return [
        claim(
            figure,
            f"{where}ahead after as many seconds",
            f"After {fitting} filtered epochs, which take as long as {epochs} "
            "unfiltered ones, the filter adds to what is measured on test samples.",
            [paired("gain", ends(early, score), ends(plain, score), low=0)],
        )
    ]


LONG = "unfiltered, as many seconds"
SHORT = "unfiltered, as many epochs"
NAMES = {FILTERED: drawing.ARM_NAMES[FILTERED], PLAIN: SHORT, LONG: LONG}
COLOURS = drawing.COLOURS | {LONG: "#CC79A7"}
MARKERS = drawing.MARKERS | {LONG: "^"}
NUM_MOMENTS = 101  # at which curves are read to average them
NAME_GAP = 0.035  # of accuracy, between the names of two lines
TWO_DECADES = 100  # of an axis, on which numbers between powers of ten have no room


@dataclass(frozen=True, slots=True)
class Case:
    """The judged rows of one comparison.

    Attributes:
        group: Task and optimizer, as they are read.
        rate: Compression rate, None for none.
        filtered: Rows of the filtered arm.
        plain: Rows of the unfiltered arm, of as many epochs.
        long: Rows of the unfiltered arm for as many seconds.
        pace: Unfiltered epochs that a filtered one takes.
    """

    group: str
    rate: float | None
    filtered: list[Row]
    plain: list[Row]
    long: list[Row]
    pace: float

    @property
    def name(self) -> str:
        """Task, optimizer and rate, as they are read."""
        rate = "uncompressed" if self.rate is None else f"rate {self.rate:,g}"
        return f"{self.group}, {rate}"

    @property
    def epochs(self) -> int:
        """Epochs of the filtered arm."""
        return int(number(self.filtered[0], "epochs"))

    @property
    def long_epochs(self) -> int:
        """Epochs of the unfiltered arm that take as long."""
        return int(number(self.long[0], "epochs"))

    def rate_of(self, arm: str, *, long: bool = False) -> float:
        """The learning rate chosen for an arm."""
        rows = self.filtered if arm == FILTERED else self.long if long else self.plain
        return number(rows[0], "lr")

    def filtered_ends(self) -> dict[int, float]:
        """Test accuracy of the filtered arm by seed."""
        return _at(self.filtered, self.epochs)

    def plain_ends(self, *, long: bool = False) -> dict[int, float]:
        """Test accuracy of the unfiltered arm, after as many epochs or seconds."""
        return _at(
            *((self.long, self.long_epochs) if long else (self.plain, self.epochs))
        )

    def averages(
        self, *, long: bool = False
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Accuracy averaged along the way, with the filter and without, by seed.

        From the end of the filtered arm's first epoch on, so that nothing is assumed
        of what was never measured.
        """
        rows, end = (self.long, self.long_epochs) if long else (self.plain, self.epochs)
        moments = np.linspace(1 / self.epochs, 1.0, NUM_MOMENTS)
        return (
            _averages(self.filtered, self.epochs, moments),
            _averages(rows, end, moments),
        )


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """The comparisons whose judged runs are all among the rows, in their order."""
    judged = [row for row in rows if row["split"] == TEST]
    columns = ("task", "num_classes", "optimizer", "rate")
    kinds = list(dict.fromkeys(tuple(row[c] for c in columns) for row in judged))
    kinds.sort(key=lambda kind: [_order(value) for value in kind])
    found = []
    for kind in kinds:
        mine = select(judged, **dict(zip(columns, kind, strict=True)))
        filtered, plain = select(mine, arm=FILTERED), select(mine, arm=PLAIN)
        longest = max(number(row, "epochs") for row in plain)
        long = select(plain, epochs=longest)
        short = select(plain, epochs=filtered[0]["epochs"]) or long
        task, num_classes, optimizer, rate = kind
        group = f"{subset_name(task, num_classes)}, {name_of(optimizer)}"
        rate = None if rate is None else number(filtered[0], "rate")
        pace = longest / number(filtered[0], "epochs")
        found.append(Case(group, rate, filtered, short, long, pace))
    return found


def draw_ends(axes: Axes, cases: Sequence[Case]) -> None:
    """Accuracy at the end by compression rate: seeds, their mean and its interval."""
    for place, case in enumerate(cases):
        ends = {
            PLAIN: case.plain_ends(),
            LONG: case.plain_ends(long=True),
            FILTERED: case.filtered_ends(),
        }
        for shift, (arm, values) in zip((-0.24, 0.0, 0.24), ends.items(), strict=True):
            x, seeds = place + shift, list(values.values())
            interval = student_interval(seeds)
            style: dict[str, Any] = {"color": COLOURS[arm], "linestyle": "none"}
            axes.plot([x - 0.07] * len(seeds), seeds, ".", markersize=2, **style)
            axes.errorbar(
                [x],
                [interval.mean],
                yerr=interval.half_width,
                marker=MARKERS[arm],
                markersize=3.5,
                capsize=2,
                linewidth=1,
                label=NAMES[arm] if place == 0 else None,
                **style,
            )
    names = ["none" if case.rate is None else f"{case.rate:,g}" for case in cases]
    axes.set_xticks(range(len(cases)), names)
    axes.set_xlim(-0.5, len(cases) - 0.5)
    drawing.label(axes, "compression rate d/m", "test accuracy")


def draw_way(axes: Axes, cases: Sequence[Case], unit: str) -> None:
    """Accuracy along the way, mean over seeds, a line a rate.

    Args:
        axes: Where.
        cases: Of one group.
        unit: "gradients" is bytes, in whole uncompressed gradients; or "seconds", in
            unfiltered epochs.
    """
    ends: list[tuple[float, float, str]] = []
    for shade, case in zip(np.linspace(1.0, 0.35, len(cases)), cases, strict=True):
        second = (
            case.long if unit == "seconds" else select_until(case.plain, case.epochs)
        )
        for arm, rows in ((FILTERED, case.filtered), (PLAIN, second)):
            y = stacked(curves(rows, "test_accuracy")).mean(axis=0)
            pace = case.pace if arm == FILTERED else 1.0
            x = _sent(rows, case) if unit == "gradients" else pace * _epochs_of(rows)
            style: dict[str, Any] = {
                "color": drawing.COLOURS[arm],
                "linestyle": drawing.DASHES[arm],
            }
            axes.plot(x, y, linewidth=1.2, alpha=shade, **style)
            if arm == FILTERED:
                rate = "none" if case.rate is None else f"{case.rate:,g}"
                ends.append((x[-1], y[-1], rate))
    # Seconds are nearly the same at all rates: names there lie one below the other.
    _name_ends(axes, ends, gap=NAME_GAP if unit == "seconds" else 0.0)
    axes.set_xscale("log")
    # By itself matplotlib labels none, or every minor tick, of less than a decade.
    first, last = axes.get_xlim()
    subs = (1.0, 2.0, 5.0) if last / first < TWO_DECADES else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    time = "time, in unfiltered epochs"
    drawing.label(axes, "bytes sent, in gradients" if unit == "gradients" else time, "")


def _name_ends(
    axes: Axes, ends: Sequence[tuple[float, float, str]], gap: float
) -> None:
    """Names at the ends of lines, each at least a gap below the one above it."""
    above = np.inf
    for x, y, name in sorted(ends, key=lambda end: -end[1]):
        above = min(y, above - gap)
        axes.annotate(name, (x, above), fontsize=drawing.NOTE, color=drawing.GREY)


def select_until(rows: Sequence[Row], epoch: int) -> list[Row]:
    """The rows up to an epoch."""
    return [row for row in rows if number(row, "epoch") <= epoch]


def _sent(rows: Sequence[Row], case: Case) -> Array:
    """How many gradients' worth of bytes has been sent after each epoch, shape (E,)."""
    row = rows[0]
    steps = number(row, "num_train") // number(row, "batch_size")
    return _epochs_of(rows) * steps / (case.rate or 1.0)


def _epochs_of(rows: Sequence[Row]) -> Array:
    return np.asarray(sorted({number(row, "epoch") for row in rows}))


def _at(rows: Sequence[Row], epoch: int) -> dict[int, float]:
    return {
        int(number(row, "seed")): number(row, "test_accuracy")
        for row in rows
        if row["epoch"] == epoch
    }


def _averages(rows: Sequence[Row], epochs: int, moments: Array) -> dict[int, float]:
    """Mean of accuracy at these shares of the whole, between epochs interpolated."""
    way = curves(select_until(rows, epochs), "test_accuracy")
    places = np.arange(1, epochs + 1) / epochs
    return {
        seed: float(np.interp(moments, places, values).mean())
        for seed, values in way.items()
    }


def _order(value: Value) -> tuple[float, str]:
    """MNIST before CIFAR-10, Adam before SGD, no compression first."""
    if isinstance(value, str):
        known = ["mnist", "digits", "cifar10", "adam", "sgd"]
        return (known.index(value) if value in known else len(known)), value
    return (0.0 if not isinstance(value, int | float) else float(value)), ""
