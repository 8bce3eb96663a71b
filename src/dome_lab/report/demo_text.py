"""The demo in words: a table and one sentence, whichever way the numbers fall."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich import box
from rich.table import Table

from dome_lab.paper.comparison import Comparison
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.statistics import Interval

ARM_NAMES = {PLAIN: "no filter", FILTERED: "with filter"}
LEARNING_RATES = (
    "Each arm has, at each rate, the learning rate that is best for it on other seeds."
)
VERDICTS = {1: "was ahead", 0: "made no clear difference", -1: "was behind"}


def rate_name(rate: float | None) -> str:
    """A rate as it is printed."""
    return "none" if rate is None else f"{rate:,.0f}"


def table(comparisons: Sequence[Comparison]) -> Table:
    """Rate by arm: learning rate, accuracy and training loss."""
    result = Table(
        title="After the last epoch, %; ± is the 95 % Student t interval over seeds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # all of it within 80 columns
    )
    times = "as many\nseconds"
    headings = ("rate", "filter", "lr", "accuracy", "gain", times, "change\nof loss")
    for heading in headings:
        result.add_column(heading, justify="right")
    for comparison in comparisons:
        for name, arm in comparison.arms.items():
            filtered = name == FILTERED
            result.add_row(
                "" if filtered else rate_name(comparison.rate),
                "yes" if filtered else "no",
                f"{comparison.learning_rates[name]:g}",
                f"{100 * arm.accuracy.mean:.1f}",
                _points(comparison.accuracy_gain) if filtered else "",
                _timed_gain(comparison) if filtered else "",
                _signed(comparison.loss_change) if filtered else "",
                end_section=filtered,
            )
    return result


def sentence(comparisons: Sequence[Comparison]) -> str:
    """What was seen at each rate, one sentence computed from the numbers."""
    removed = [c.arms[FILTERED].removed.mean for c in comparisons]
    share = 100 * sum(removed) / len(removed)
    accuracy = [
        (c.accuracy_gain.sign, f"{_where(c.rate)} ({_points(c.accuracy_gain)} points)")
        for c in comparisons
    ]
    loss = [
        (-c.loss_change.sign, f"{_where(c.rate)} ({_signed(c.loss_change)})")
        for c in comparisons
    ]
    return (
        f"The filter took {share:.0f} % of the gradient's norm away: in test accuracy "
        f"it {_verdicts(accuracy)}; in training loss it {_verdicts(loss)}; "
        f"± is the 95 % interval of the difference, paired by seed. {LEARNING_RATES} "
        f"An epoch takes {costs(comparisons)} times as long with the filter"
        f"{_timed_verdicts(comparisons)}."
    )


def _timed_verdicts(comparisons: Sequence[Comparison]) -> str:
    """What was seen in as many seconds."""
    timed = [
        (c.timed.gain.sign, f"{_where(c.rate)} ({_points(c.timed.gain)} points)")
        for c in comparisons
        if c.timed
    ]
    return f"; in as many seconds it {_verdicts(timed)} in accuracy" if timed else ""


def costs(comparisons: Sequence[Comparison]) -> str:
    """How many times as long an epoch takes with the filter."""
    times = sorted(f"{c.cost:.1f}" for c in comparisons)
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def _verdicts(findings: Sequence[tuple[int, str]]) -> str:
    """Neighbouring rates with the same outcome share its words."""
    return _joined(
        [
            f"{VERDICTS[sign]} {_joined([where for _, where in alike])}"
            for sign, alike in groupby(findings, key=itemgetter(0))
        ]
    )


def _where(rate: float | None) -> str:
    return "without compression" if rate is None else f"at rate {rate:,.0f}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _points(gain: Interval) -> str:
    return f"{100 * gain.mean:+.1f} ± {100 * gain.half_width:.1f}"


def _signed(change: Interval) -> str:
    return f"{change.mean:+.2f} ± {change.half_width:.2f}"


def _timed_gain(comparison: Comparison) -> str:
    return _points(comparison.timed.gain) if comparison.timed else "-"
