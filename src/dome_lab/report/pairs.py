"""With the filter against without, at the end of training, seed by seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dome_lab.paper.statistics import Interval, interval_or_none, paired_changes
from dome_lab.report.groups import FEWEST_SEEDS, Group, number
from dome_lab.report.labels import other_fields
from dome_lab.report.sources import Trial

COMPARED = {"test_accuracy", "train_loss"}
ROUNDING = 1e-9  # of a quotient that is a whole number
LAST = 10  # one over the share of a run that is its end
VERDICTS = {1: "better", 0: "unclear", -1: "worse"}


@dataclass(frozen=True, slots=True)
class Timed:
    """Two groups after as many seconds: those of the group that took fewer.

    Attributes:
        column: What is compared.
        before: Its mean without the filter.
        after: The same with it.
        change: None if there is no interval.
    """

    column: str
    before: float
    after: float
    change: Interval | None

    @property
    def is_ahead(self) -> bool:
        """Whether the filter clearly gains: in accuracy, or else in loss."""
        better = -1 if self.column == "train_loss" else 1
        return self.change is not None and self.change.sign == better


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups that differ in nothing but the filter.

    Attributes:
        name: What sets this comparison apart from others, in words; may be empty.
        seeds: Those that both have.
        before: Mean test accuracy without the filter, NaN if a seed has none.
        after: The same with it.
        accuracy: Gain in test accuracy; None if there is no interval.
        loss: Change in training loss; None if there is no interval.
        cost: Seconds of an epoch or step with the filter, in those without; NaN if they
            were not noted, or if a tracker watches the run without.
        loss_before: Mean training loss without the filter.
        loss_after: The same with it.
        timed: Both after as many seconds; None if that is not known.
    """

    name: str
    seeds: list[int]
    before: float
    after: float
    accuracy: Interval | None
    loss: Interval | None
    cost: float = math.nan
    loss_before: float = math.nan
    loss_after: float = math.nan
    timed: "Timed | None" = None

    @property
    def verdict(self) -> int:
        """1: clearly more accurate with the filter, -1: clearly less, 0: unclear."""
        return 0 if self.accuracy is None else self.accuracy.sign

    @property
    def loss_verdict(self) -> int:
        """1: clearly less loss with the filter, -1: clearly more, 0: unclear."""
        return 0 if self.loss is None else -self.loss.sign


def pairs_of(groups: Sequence[Group]) -> list[Pair]:
    """Every filtered group with the plain one of the same settings, if there is one."""
    known = [g for g in groups if COMPARED & g.lines.keys()]
    filters = [group for group in known if not group.is_plain]
    several = len({group.arm for group in filters}) > 1
    found = []
    for filtered in filters:
        other = other_fields(filtered.settings)
        plain = [g for g in known if g.is_plain and other_fields(g.settings) == other]
        if plain:
            parts = (filtered.setting, filtered.arm if several else "")
            name = ", ".join(part for part in parts if part)
            found.append(_pair(name, plain[0], filtered))
    return found


def end(trial: Trial, column: str) -> float:
    """The value after the last epoch; NaN if it is not a number.

    Of a loop of one's own the mean of the last tenth of what it noted: its rows may be
    of single steps.
    """
    if trial.known:
        return number(trial.rows[-1].get(column))
    noted = [number(row[column]) for row in trial.rows if row.get(column) is not None]
    return _mean(noted[-math.ceil(len(noted) / LAST) :])


def signed(change: Interval, scale: float, digits: int) -> str:
    """A difference with its interval."""
    mean, low, high = (
        f"{scale * value:+.{digits}f}".replace("-", "−")
        for value in (change.mean, change.low, change.high)
    )
    return f"{mean} [{low}, {high}]"


def _pair(name: str, plain: Group, filtered: Group) -> Pair:
    before, after = (_ends(group, "test_accuracy") for group in (plain, filtered))
    gains = paired_changes(after, before)
    plain_losses, own_losses = (_ends(g, "train_loss") for g in (plain, filtered))
    losses = paired_changes(own_losses, plain_losses)
    return Pair(
        name,
        list(gains),
        _mean([before[seed] for seed in gains]),
        _mean([after[seed] for seed in gains]),
        interval_of(list(gains.values())),
        interval_of(list(losses.values())),
        _cost(plain, filtered),
        _mean([plain_losses[seed] for seed in losses]),
        _mean([own_losses[seed] for seed in losses]),
        None if _is_watched(plain) else _timed(plain, filtered),
    )


def interval_of(values: Sequence[float]) -> Interval | None:
    """The 95 % interval of three seeds or more that differ."""
    return interval_or_none(values) if len(values) >= FEWEST_SEEDS else None


def _timed(plain: Group, filtered: Group) -> Timed | None:
    """What each arm had reached when the faster one ended."""
    pace = {id(group): _seconds(group) for group in (plain, filtered)}
    rows = {id(g): min(len(t.rows) for t in g.trials) for g in (plain, filtered)}
    ends = [pace[key] * rows[key] for key in pace]
    if not all(map(math.isfinite, ends)):  # not every row tells its seconds
        return None
    fastest = min(ends)
    for column in ("test_accuracy", "train_loss"):
        before, after = (
            {
                trial.seed: _early(trial, column, fastest / pace[id(group)])
                for trial in group.trials
            }
            for group in (plain, filtered)
        )
        changes = paired_changes(after, before)
        if changes and all(map(math.isfinite, changes.values())):
            return Timed(
                column,
                _mean([before[seed] for seed in changes]),
                _mean([after[seed] for seed in changes]),
                interval_of(list(changes.values())),
            )
    return None


def _early(trial: Trial, column: str, num_rows: float) -> float:
    """The value after so many rows; NaN if that is before the first."""
    rows = trial.rows[: int(num_rows + ROUNDING)]
    return end(replace(trial, rows=rows), column) if rows else math.nan


def _is_watched(plain: Group) -> bool:
    # A tracker that only watches takes nearly all of the time that a filter takes.
    return plain.settings.get("rank") is not None


def _cost(plain: Group, filtered: Group) -> float:
    if _is_watched(plain):
        return math.nan
    return _seconds(filtered) / _seconds(plain)


def _seconds(group: Group) -> float:
    """The processor's seconds of an epoch, the median over all seeds; or NaN."""
    if not group.trials[0].known:
        return _step_seconds(group)
    rows = [row for trial in group.trials for row in trial.rows]
    found = [number(row.get("processor_seconds")) for row in rows]
    # A median, because an epoch's seconds vary with what else the machine does.
    return statistics.median(found) if all(map(math.isfinite, found)) else math.nan


def _step_seconds(group: Group) -> float:
    """Seconds from one row to the next of a loop of one's own, the median; or NaN."""
    gaps = [
        number(after.get("elapsed")) - number(before.get("elapsed"))
        for trial in group.trials
        for before, after in pairwise(trial.rows)
    ]
    there = [gap for gap in gaps if gap > 0]  # a resumed run begins at zero again
    return statistics.median(there) if there else math.nan


def _ends(group: Group, column: str) -> dict[int, float]:
    return {trial.seed: end(trial, column) for trial in group.trials}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
