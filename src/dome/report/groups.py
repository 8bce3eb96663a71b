"""Runs of the same settings as one line with an interval.

Shapes: S seeds, X places on the horizontal axis. Lines are means over seeds with 95 %
Student t intervals, at every place by itself. Where a seed has no number (it diverged,
or nothing was measured) there is no mean: a mean of the others would flatter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dome.paper.cost import seconds_of
from dome.paper.rows import MADE_BY as MADE_BY_COLUMN
from dome.paper.rows import NUM_ROWS, Row
from dome.paper.statistics import student_interval
from dome.report import labels
from dome.report.sources import SEED, Section, Trial

MOST_POINTS = 500  # of a line; longer ones are averaged over neighbours
PERCENT = 100.0

Number = float | None


@dataclass(frozen=True, slots=True)
class Metric:
    """What a picture shows.

    Attributes:
        column: The rows' column.
        title: What it is, in words.
        unit: Written after numbers.
        scale: Numbers are multiplied by it.
    """

    column: str
    title: str
    unit: str = ""
    scale: float = 1.0


REMOVED = "removed"
METRICS = (
    Metric("test_accuracy", "Test accuracy", "%", PERCENT),
    Metric("train_loss", "Training loss"),
    Metric(REMOVED, "Norm of the batch gradient that was removed", "%", PERCENT),
    Metric("fraction", "Fraction of a sample's norm in the subspace", "%", PERCENT),
    Metric("drift", "Drift: largest angle turned in an epoch", "°"),
    Metric("test_loss", "Test loss"),
    Metric("test_macro_f1", "Test macro-F1", "%", PERCENT),
)
_NOT_DRAWN = {
    *(SEED, "epoch", "step", "index", "eigenvalue", "eigenvalues", "seconds"),
    *(NUM_ROWS, MADE_BY_COLUMN, "arm", "kept_norm"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A mean over seeds by place, shape (X,) each; ends are empty with one seed."""

    x: list[float]
    mean: list[Number]
    low: list[Number]
    high: list[Number]


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Eigenvalues by index at one time.

    Means and intervals are of logarithms: on a logarithmic axis an interval around the
    mean of the values themselves could reach below zero.
    """

    time: float
    line: Line


@dataclass(frozen=True, slots=True)
class Group:
    """Seeds of the same settings.

    Attributes:
        arm: What is done to the gradient, in words.
        setting: Everything else that sets runs apart, in words.
        trials: One a seed.
        lines: By column.
        spectra: In order of time.
        time_name: "epoch" or "step": what the horizontal axis of lines is.
    """

    arm: str
    setting: str
    trials: list[Trial]
    lines: dict[str, Line]
    spectra: list[Spectrum]
    time_name: str

    @property
    def settings(self) -> dict[str, object]:
        """What the seeds share."""
        return self.trials[0].settings

    @property
    def is_plain(self) -> bool:
        """Whether nothing is taken out of the gradient."""
        return labels.is_plain(self.settings)

    @property
    def seconds(self) -> float:
        """What a seed took, on average; 0 if nobody noted it."""
        return seconds_of(r for t in self.trials for r in t.rows) / len(self.trials)


def groups_of(section: Section) -> list[Group]:
    """The runs of a section, those of the same settings together."""
    by_settings: dict[str, list[Trial]] = {}
    for trial in section.trials:
        by_settings.setdefault(repr(sorted(trial.settings.items())), []).append(trial)
    found = list(by_settings.values())
    every = [trials[0].settings for trials in found]
    made = [_group(trials, every) for trials in found]
    return sorted(made, key=_order)


def metrics_of(groups: Sequence[Group]) -> list[Metric]:
    """What there are numbers of: the columns we know first, then others by name."""
    present = {column for group in groups for column in group.lines}
    known = [metric for metric in METRICS if metric.column in present]
    others = sorted(present - {metric.column for metric in METRICS})
    named = [Metric(column, column.replace("_", " ")) for column in others]
    if not all(trial.known for group in groups for trial in group.trials):
        # Another loop may count drift in other units.
        known = [Metric(m.column, "Drift") if m.column == "drift" else m for m in known]
    return known + named


def number(value: object) -> float:
    """A number of a row; NaN for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good else math.nan  # type: ignore[arg-type]


def removed_share(trial: Trial) -> float:
    """Share of the batch gradient's norm that was removed, mean over a run; or NaN."""
    kept = [number(row.get("kept_norm")) for row in trial.rows]
    return 1 - math.fsum(kept) / len(kept)


def _group(trials: list[Trial], every: Sequence[dict[str, object]]) -> Group:
    settings = trials[0].settings
    time_name = "step" if any("step" in row for row in trials[0].rows) else "epoch"
    trials = sorted(trials, key=lambda trial: trial.seed)
    columns = [] if is_spectrum(trials[0]) else _columns(trials)
    lines = {c: _line(trials, time_name, _reader(c)) for c in columns}
    return Group(
        labels.arm_name(settings, every),
        labels.other_name(settings, every),
        trials,
        {c: line for c, line in lines.items() if any(m is not None for m in line.mean)},
        _spectra(trials, time_name),
        time_name,
    )


def _order(group: Group) -> tuple[object, ...]:
    """Plain before filtered; by compression, batch and rank."""
    settings = group.settings
    numbers = (number(settings.get(name)) for name in ("rate", "batch_size", "rank"))
    sizes = [0.0 if math.isnan(n) else n for n in numbers]
    return (
        str(settings.get("task")),
        *sizes[:2],
        not group.is_plain,
        sizes[2],
        group.arm,
    )


def _columns(trials: Sequence[Trial]) -> list[str]:
    """The columns of numbers that say something about training."""
    columns = {name for trial in trials for row in trial.rows for name in row}
    columns -= _NOT_DRAWN | set(trials[0].settings)
    filters = not labels.is_plain(trials[0].settings)
    return sorted(columns | ({REMOVED} if filters else set()))


def _reader(column: str) -> Callable[[Row], float]:
    if column == REMOVED:
        return lambda row: 1 - number(row.get("kept_norm"))
    return lambda row: number(row.get(column))


def _line(
    trials: Sequence[Trial], time_name: str, read: Callable[[Row], float]
) -> Line:
    seeds: list[dict[float, float]] = []
    for trial in trials:
        mine = {}
        for place, row in enumerate(trial.rows, start=1):
            time = number(row.get(time_name, place))
            if math.isfinite(time):
                mine[time] = read(row)
        seeds.append(mine)
    x = sorted({time for seed in seeds for time in seed})
    values = [[seed.get(time, math.nan) for seed in seeds] for time in x]
    return _with_intervals(*_thinned(x, values))


def _thinned(
    x: list[float], values: list[list[float]]
) -> tuple[list[float], list[list[float]]]:
    """Neighbours averaged, seed by seed, so that few enough places are left."""
    size = math.ceil(len(x) / MOST_POINTS)
    if size <= 1:
        return x, values
    starts = range(0, len(x), size)
    means = [
        [_mean(seed) for seed in zip(*values[s : s + size], strict=True)]
        for s in starts
    ]
    return [_mean(x[s : s + size]) for s in starts], means


def _mean(values: Sequence[float]) -> float:
    """Of the numbers that are there: most columns are measured now and then only."""
    there = [value for value in values if math.isfinite(value)]
    return math.fsum(there) / len(there) if there else math.nan


def _with_intervals(x: list[float], values: list[list[float]]) -> Line:
    """One list of seeds for each place."""
    line = Line(x, [], [], [])
    for seeds in values:
        if not all(map(math.isfinite, seeds)):
            mean = low = high = None
        elif len(seeds) == 1:
            mean, low, high = seeds[0], None, None
        else:
            interval = student_interval(seeds)
            mean, low, high = interval.mean, interval.low, interval.high
        line.mean.append(mean)
        line.low.append(low)
        line.high.append(high)
    return line


def is_spectrum(trial: Trial) -> bool:
    """Whether rows are eigenvalues of one time, a row each."""
    return all("index" in row and "eigenvalue" in row for row in trial.rows)


def _spectra(trials: Sequence[Trial], time_name: str) -> list[Spectrum]:
    seeds = [_spectra_of(trial, time_name) for trial in trials]
    times = sorted(set.intersection(*(set(seed) for seed in seeds)))
    return [Spectrum(time, _log_line([seed[time] for seed in seeds])) for time in times]


def _spectra_of(trial: Trial, time_name: str) -> dict[float, dict[float, float]]:
    """Eigenvalues by index, by time."""
    found: dict[float, dict[float, float]] = {}
    single = is_spectrum(trial)
    for place, row in enumerate(trial.rows, start=1):
        time = number(row.get(time_name, place))
        if single:
            value = number(row["eigenvalue"])
            found.setdefault(time, {})[number(row["index"])] = value
        elif isinstance(listed := row.get("eigenvalues"), list) and listed:
            found[time] = dict(enumerate(map(number, listed), start=1))
    return found


def _log_line(seeds: Sequence[dict[float, float]]) -> Line:
    index = sorted(set.intersection(*(set(seed) for seed in seeds)))
    logs = [[math.log10(s[i]) if s[i] > 0 else math.nan for s in seeds] for i in index]
    line = _with_intervals(index, logs)
    return Line(line.x, *map(_powers, (line.mean, line.low, line.high)))


def _powers(logs: Sequence[Number]) -> list[Number]:
    return [None if log is None else 10**log for log in logs]
