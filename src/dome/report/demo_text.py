"""The demo in words: a table and one sentence, whichever way the numbers fall."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from dome.paper.comparison import Comparison
from dome.paper.statistics import Interval
from dome.paper.train import FILTERED, PLAIN, Run

ARM_NAMES = {PLAIN: "no filter", FILTERED: "with filter"}
VERDICTS = {1: "was ahead", 0: "made no clear difference", -1: "was behind"}


def rate_name(rate: float | None) -> str:
    """A rate as it is printed."""
    return "none" if rate is None else f"{rate:,.0f}"


def run_name(run: Run) -> str:
    """A run as the progress bar shows it."""
    rate = "no compression" if run.rate is None else f"rate {run.rate:,.0f}"
    return f"{ARM_NAMES[run.arm]}, {rate}, seed {run.seed}"


def table(comparisons: Sequence[Comparison]) -> Table:
    """Rate by arm: accuracy, training loss and what the filter took."""
    result = Table(
        title="After the last epoch: mean over seeds ± 95 % Student t interval",
        title_justify="left",
    )
    result.add_column("rate", justify="right")
    result.add_column("filter")
    for heading in ("accuracy, %", "gain, points", "train loss", "norm removed"):
        result.add_column(heading, justify="right")
    for comparison in comparisons:
        for name, arm in comparison.arms.items():
            filtered = name == FILTERED
            gain = _plus_minus(comparison.accuracy_gain, 100, signed=True)
            result.add_row(
                "" if filtered else rate_name(comparison.rate),
                "yes" if filtered else "no",
                _plus_minus(arm.accuracy, 100),
                gain if filtered else "",
                _plus_minus(arm.train_loss, 1, digits=2),
                f"{100 * arm.removed.mean:.0f} %" if filtered else "",
                end_section=filtered,
            )
    return result


def sentence(comparisons: Sequence[Comparison]) -> str:
    """What was seen at each rate, one sentence computed from the numbers."""
    parts = [
        f"{VERDICTS[sign]} {_joined([_gain_at(c) for c in alike])}"
        for sign, alike in groupby(comparisons, key=lambda c: c.accuracy_gain.sign)
    ]
    removed = [c.arms[FILTERED].removed.mean for c in comparisons]
    share = 100 * sum(removed) / len(removed)
    return (
        f"In test accuracy the filter, which took {share:.0f} % of the gradient's norm "
        f"away, {_joined(parts)}; "
        "± is the 95 % interval of the difference, paired by seed."
    )


def _gain_at(comparison: Comparison) -> str:
    gain = _plus_minus(comparison.accuracy_gain, 100, signed=True)
    return f"{_where(comparison.rate)} ({gain} points)"


def _where(rate: float | None) -> str:
    return "without compression" if rate is None else f"at rate {rate:,.0f}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _plus_minus(
    interval: Interval, scale: float, *, digits: int = 1, signed: bool = False
) -> str:
    sign = "+" if signed else ""
    mean, half = scale * interval.mean, scale * interval.half_width
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"
