"""With the filter against without, at each rate, over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.statistics import Interval, paired_changes, student_interval


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm at the end of training: intervals over seeds.

    Attributes:
        accuracy: Test accuracy after the last epoch.
        train_loss: Mean over the last epoch's batches.
        removed: Share of the gradient's norm that the filter took, over all steps.
    """

    accuracy: Interval
    train_loss: Interval
    removed: Interval


@dataclass(frozen=True, slots=True)
class Timed:
    """Both arms after as many seconds: those of all epochs without the filter.

    Attributes:
        epochs: How many filtered epochs fit in.
        accuracy: Of the filtered arm after these.
        gain: Filtered minus plain, paired by seed.
    """

    epochs: int
    accuracy: Interval
    gain: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms at one rate, and their difference seed by seed.

    Attributes:
        rate: Compression rate, None for none.
        arms: The arms by name.
        accuracy_gain: Filtered minus plain. Paired: the arms of a seed share initial
            weights, sample order and sketch noise.
        loss_change: Filtered minus plain training loss, paired too: less is better.
        learning_rates: Of the arms, where they were chosen for each.
        cost: The processor's seconds of an epoch with the filter, in those without.
        timed: Both arms after as many seconds; None if no filtered epoch fits in.
    """

    rate: float | None
    arms: dict[str, Arm]
    accuracy_gain: Interval
    loss_change: Interval
    learning_rates: dict[str, float] = field(default_factory=dict)
    cost: float = math.nan
    timed: "Timed | None" = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A column by epoch: one interval over seeds for each epoch."""

    epochs: list[int]
    values: list[Interval]


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """One comparison a rate, from no compression to the harshest."""
    return [_compare_at(rate, rows) for rate in rates(rows)]


def rates(rows: Sequence[Row]) -> list[float | None]:
    """The rates among the rows, no compression first."""
    present = {_number_or_none(row["rate"]) for row in rows}
    return sorted(present, key=lambda rate: 0.0 if rate is None else rate)


def curve(rows: Sequence[Row], arm: str, rate: float | None, column: str) -> Curve:
    """How a column went, epoch by epoch, in one arm at one rate."""
    mine = [row for row in rows if row["arm"] == arm and row["rate"] == rate]
    epochs = sorted({int(_number(row["epoch"])) for row in mine})
    values = [
        student_interval([_number(r[column]) for r in mine if r["epoch"] == epoch])
        for epoch in epochs
    ]
    return Curve(epochs, values)


def _compare_at(rate: float | None, rows: Sequence[Row]) -> Comparison:
    mine = [row for row in rows if row["rate"] == rate]
    plain = [row for row in mine if row["arm"] == PLAIN]
    filtered = [row for row in mine if row["arm"] == FILTERED]
    before, after = _by_seed(plain), _by_seed(filtered)
    if before.keys() != after.keys():
        raise ValueError(
            f"rate {rate}: seeds {sorted(before)} without the filter, "
            f"{sorted(after)} with it: finish the runs first"
        )
    return Comparison(
        rate,
        {PLAIN: _arm(before), FILTERED: _arm(after)},
        _change(after, before, "test_accuracy"),
        _change(after, before, "train_loss"),
        {
            arm: _number(mine[0]["lr"])
            for arm, mine in ((PLAIN, plain), (FILTERED, filtered))
        },
        _seconds(filtered) / _seconds(plain),
        _timed(before, after, _seconds(plain) / _seconds(filtered)),
    )


def _timed(
    before: dict[int, list[Row]], after: dict[int, list[Row]], speed: float
) -> Timed | None:
    epochs = int(speed * max(len(run) for run in before.values()))
    if not epochs:
        return None
    early = {seed: run[:epochs] for seed, run in after.items()}
    accuracy = _ends(early, "test_accuracy")
    gain = _change(early, before, "test_accuracy")
    return Timed(epochs, student_interval(list(accuracy.values())), gain)


def _seconds(rows: Sequence[Row]) -> float:
    """The processor's seconds of an epoch, the median over epochs and seeds."""
    return statistics.median(_number(row["processor_seconds"]) for row in rows)


def _arm(runs: dict[int, list[Row]]) -> Arm:
    removed = [
        1 - sum(_number(row["kept_norm"]) for row in run) / len(run)
        for run in runs.values()
    ]
    return Arm(
        student_interval(list(_ends(runs, "test_accuracy").values())),
        student_interval(list(_ends(runs, "train_loss").values())),
        student_interval(removed),
    )


def _change(
    after: dict[int, list[Row]], before: dict[int, list[Row]], column: str
) -> Interval:
    changes = paired_changes(_ends(after, column), _ends(before, column))
    return student_interval(list(changes.values()))


def _by_seed(rows: Sequence[Row]) -> dict[int, list[Row]]:
    runs: dict[int, list[Row]] = {}
    for row in rows:
        runs.setdefault(int(_number(row["seed"])), []).append(row)
    return {
        seed: sorted(runs[seed], key=lambda row: _number(row["epoch"]))
        for seed in sorted(runs)
    }


def _ends(runs: dict[int, list[Row]], column: str) -> dict[int, float]:
    """The value after the last epoch, by seed."""
    return {seed: _number(run[-1][column]) for seed, run in runs.items()}


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number in a row, got {value!r}")
    return float(value)


def _number_or_none(value: object) -> float | None:
    return None if value is None else _number(value)
