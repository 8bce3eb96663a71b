"""Runs of the same settings together, and what there is to show of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from dome.diagnostics import FilterStats
from dome_lab.paper.rows import MADE_BY as MADE_BY_COLUMN
from dome_lab.paper.rows import NUM_ROWS, Row, seconds_of
from dome_lab.paper.statistics import student_interval
from dome_lab.report import labels
from dome_lab.report.sources import SEED, Section, Trial

FEWEST_SEEDS = 3  # for an interval
MOST_POINTS = 500  # of a line; longer ones are averaged over neighbours
LARGEST = 1e150
MOST_SPECTRA = 50  # of more, evenly spaced ones are shown

Number = float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A mean over seeds by place, shape (X,) each.

    One or two seeds have no interval; of two there are the seeds themselves.
    """

    x: list[float]
    mean: list[Number]
    low: list[Number]
    high: list[Number]
    seeds: Sequence[list[Number]] = ()


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Eigenvalues by index at one time.

    Means and intervals are of logarithms: on a logarithmic axis an interval around the
    mean of the values themselves could reach below zero.
    """

    time: float
    line: Line


def number(value: object) -> float:
    """A number of a row; NaN for anything else, and where squares overflow."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good and abs(value) < LARGEST else math.nan  # type: ignore[arg-type]


def line_of(
    trials: Sequence[Trial], time_name: str, read: Callable[[Row], float]
) -> Line:
    """What is read from the rows of several seeds, by time."""
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


def along(line: Line, places: Line) -> Line:
    """The same line over another axis: seconds or bytes at each of its places."""
    at = dict(zip(places.x, places.mean, strict=True))
    kept = [i for i, x in enumerate(line.x) if at.get(x) is not None]

    def there(values: list[Number]) -> list[Number]:
        return [values[i] for i in kept]

    x = [float(at[line.x[i]] or 0.0) for i in kept]
    ends = there(line.mean), there(line.low), there(line.high)
    return Line(x, *ends, [there(seed) for seed in line.seeds])


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
        elif len(seeds) < FEWEST_SEEDS:  # an interval of two reaches anywhere
            mean, low, high = math.fsum(seeds) / len(seeds), None, None
        else:
            interval = student_interval(seeds)
            mean, low, high = interval.mean, interval.low, interval.high
        line.mean.append(mean)
        line.low.append(low)
        line.high.append(high)
    if values and 1 < len(values[0]) < FEWEST_SEEDS:
        by_seed = zip(*values, strict=True)
        return replace(line, seeds=[list(map(_finite, seed)) for seed in by_seed])
    return line


def _finite(value: float) -> Number:
    return value if math.isfinite(value) else None


def is_spectrum(trial: Trial) -> bool:
    """Whether rows are eigenvalues of one time, a row each."""
    return all("index" in row and "eigenvalue" in row for row in trial.rows)


def spectra_of(trials: Sequence[Trial], time_name: str) -> list[Spectrum]:
    """The spectra of several seeds, at times that all of them have."""
    seeds = [_times_of(trial, time_name) for trial in trials]
    times = sorted(set.intersection(*(set(seed) for seed in seeds)))
    if len(times) > MOST_SPECTRA:
        last = len(times) - 1
        kept = {round(i * last / (MOST_SPECTRA - 1)) for i in range(MOST_SPECTRA)}
        times = [times[i] for i in sorted(kept)]
    return [Spectrum(time, _log_line([seed[time] for seed in seeds])) for time in times]


def _times_of(trial: Trial, time_name: str) -> dict[float, dict[float, float]]:
    """Eigenvalues by index, by time."""
    found: dict[float, dict[float, float]] = {}
    single = is_spectrum(trial)
    for place, row in enumerate(trial.rows, start=1):
        time = number(row.get(time_name, place))
        if not math.isfinite(time):
            continue
        if single and math.isfinite(index := number(row["index"])):
            found.setdefault(time, {})[index] = number(row["eigenvalue"])
        elif isinstance(listed := row.get("eigenvalues"), list) and listed:
            found[time] = dict(enumerate(map(number, listed), start=1))
    return found


def _log_line(seeds: Sequence[dict[float, float]]) -> Line:
    index = sorted(set.intersection(*(set(seed) for seed in seeds)))
    logs = [[math.log10(s[i]) if s[i] > 0 else math.nan for s in seeds] for i in index]
    line = _with_intervals(index, logs)
    ends = _powers(line.mean), _powers(line.low), _powers(line.high)
    return Line(line.x, *ends, list(map(_powers, line.seeds)))


def _powers(logs: Sequence[Number]) -> list[Number]:
    return [None if log is None else 10**log for log in logs]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a picture shows.

    Attributes:
        column: The rows' column.
        title: What it is, in words.
        unit: Written after numbers.
        scale: Numbers are multiplied by it.
        along: What the horizontal axis is, if not the step or epoch.
        least: The least that there can be.
        most: The most that there can be.
    """

    column: str
    title: str
    unit: str = ""
    scale: float = 1.0
    along: str = ""
    least: float = -math.inf
    most: float = math.inf

    @property
    def key(self) -> str:
        """What its lines are found by."""
        return f"{self.column} along {self.along}" if self.along else self.column


def _share(column: str, title: str) -> Metric:
    return Metric(column, title, "%", 100.0, least=0.0, most=1.0)


REMOVED = "removed"
OUR_DRIFT = Metric("drift", "Drift: largest angle turned in an epoch", "°", least=0.0)
ANY_DRIFT = Metric("drift", "Drift")  # another loop may count it in other units
MAIN = (
    _share("test_accuracy", "Test accuracy"),
    Metric("train_loss", "Training loss"),
    _share(REMOVED, "Norm of the batch gradient that was removed"),
    _share("fraction", "Fraction of a sample's norm in the subspace"),
    OUR_DRIFT,
    ANY_DRIFT,
)
MACRO_F1 = "test_macro_f1"
METRICS = (
    *MAIN,
    Metric("test_loss", "Test loss"),
    _share(MACRO_F1, "Test macro-F1"),
    Metric("effective_rank", "Effective rank", least=0.0),
)
# Columns that runs are also compared along, and what the axis says.
RELATIVE = "bytes sent (1: an uncompressed epoch)"
AXES = {"elapsed": "seconds", "total_bytes": "bytes sent", "epochs_of_bytes": RELATIVE}
SAME = 0.02  # macro-F1 next to accuracy: classes are balanced, if no more apart
COMPARED = ("test_accuracy", "test_loss", "train_loss")  # the first one there is
_NOT_DRAWN = {
    *(SEED, "epoch", "step", "index", "eigenvalue", "eigenvalues", "seconds"),
    *(NUM_ROWS, MADE_BY_COLUMN, "arm", "kept_norm", labels.FILTERED, *AXES),
    *("orthogonality_error", "skipped_updates", "removed_share"),
    *("processor_seconds", "times_fewer_bits"),  # shown as axes
    *("worker", "num_workers", "bytes_sent", "ddp_bytes", "total_ddp_bytes"),
}
_STATS = {field.name for field in fields(FilterStats)}


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
        """What a seed took, on average; 0 if nobody noted it.

        The column ``seconds`` of another loop may be anything, such as the filter's.
        """
        if not self.trials[0].known:
            return 0.0
        return seconds_of(r for t in self.trials for r in t.rows) / len(self.trials)


def groups_of(section: Section) -> list[Group]:
    """The runs of a section, those of the same settings together."""
    by_settings: dict[str, list[Trial]] = {}
    for trial in (part for whole in section.trials for part in _single(whole)):
        by_settings.setdefault(repr(sorted(trial.settings.items())), []).append(trial)
    found = list(by_settings.values())
    every = [trials[0].settings for trials in found]
    made = [_group(trials, every) for trials in found]
    return sorted(made, key=_order)


def metrics_of(groups: Sequence[Group]) -> list[Metric]:
    """What there are numbers of: the columns we know, the user's own, the filter's.

    What does not change during any run is left out, but for what runs are compared by;
    and what repeats another picture.
    """
    present = {c for group in groups for c, line in group.lines.items()}
    moving = {c for c in present if c in COMPARED or not _is_constant(c, groups)}
    if _repeats(groups):
        moving.discard(MACRO_F1)
    ours = all(trial.known for group in groups for trial in group.trials)
    other = ANY_DRIFT if ours else OUR_DRIFT
    known = [m for m in METRICS if m.column in moving and m != other]
    others = moving - {metric.column for metric in METRICS}
    others = {
        c for c in others if not any(c.endswith(f" along {a}") for a in AXES.values())
    }
    named = [
        Metric(column, f"{column[:1].upper()}{column[1:]}".replace("_", " "))
        for column in sorted(others, key=lambda c: (c in _STATS, c))
    ]
    first = [metric for metric in known if metric.column in COMPARED[::2]]
    rest = [metric for metric in known if metric not in first]
    return first + _compared(known, groups) + rest + named


def _repeats(groups: Sequence[Group]) -> bool:
    """Whether macro-F1 ends where accuracy does, in all runs."""
    ends = [
        [group.lines[c].mean[-1] for c in ("test_accuracy", MACRO_F1)]
        for group in groups
        if {"test_accuracy", MACRO_F1} <= group.lines.keys()
    ]
    return all(a is None or b is None or abs(a - b) < SAME for a, b in ends)


def _compared(known: Sequence[Metric], groups: Sequence[Group]) -> list[Metric]:
    """What arms are compared by, along seconds and along bytes; where all noted it."""
    for column in COMPARED:
        for metric in known:
            if metric.column == column:
                made = [
                    replace(metric, title=f"{metric.title} by {axis}", along=axis)
                    for axis in AXES.values()
                ]
                having = [group.lines for group in groups if column in group.lines]
                return [
                    m
                    for m in made
                    if all(m.key in lines for lines in having)
                    and (
                        m.along != RELATIVE or _differ([one[m.key].x for one in having])
                    )
                ]
    return []


def _differ(places: Sequence[list[float]]) -> bool:
    return any(place != places[0] for place in places)


def _is_constant(column: str, groups: Sequence[Group]) -> bool:
    """Whether no line of a column rises or falls, of those with several places."""
    lines = [group.lines[column] for group in groups if column in group.lines]
    means = [[v for v in line.mean if v is not None] for line in lines if line.x[1:]]
    return bool(means) and not any(len(set(mean)) > 1 for mean in means)


def removed_share(trial: Trial) -> float:
    """Share of the batch gradient's norm that was removed, mean over a run; or NaN."""
    kept = [number(row.get("kept_norm")) for row in trial.rows]
    return 1 - math.fsum(kept) / len(kept)


def _time_name(trial: Trial) -> str:
    return "step" if any("step" in row for row in trial.rows) else "epoch"


def _single(trial: Trial) -> list[Trial]:
    """A run as parts that have one row at a time.

    Where a run has several at a time, as when several things are measured at once,
    columns of words tell them apart, and if these do not, whole numbers.
    """
    time_name = _time_name(trial)
    times = [row.get(time_name) for row in trial.rows]
    # By their words, here and below: a value of a row may be a list.
    if is_spectrum(trial) or len({*map(repr, times)}) == len(times) or None in times:
        return [trial]
    for kind in (str, int):
        names = dict.fromkeys(
            name
            for row in trial.rows
            for name, value in row.items()
            if isinstance(value, kind)
            and name not in trial.settings.keys() | _NOT_DRAWN
        )
        parts: dict[str, list[Row]] = {}
        for row in trial.rows:
            parts.setdefault(repr([row.get(name) for name in names]), []).append(row)
        if len(parts) > 1:
            return [
                one
                for rows in parts.values()
                for one in _single(
                    replace(
                        trial,
                        settings=trial.settings | {n: rows[0].get(n) for n in names},
                        rows=rows,
                    )
                )
            ]
    return [trial]


def _group(trials: list[Trial], every: Sequence[dict[str, object]]) -> Group:
    settings = trials[0].settings
    time_name = _time_name(trials[0])
    trials = sorted(trials, key=lambda trial: trial.seed)
    columns = [] if is_spectrum(trials[0]) else _columns(trials)
    lines = {c: line_of(trials, time_name, _reader(c)) for c in columns}
    lines |= _along_axes(lines, trials, time_name)
    return Group(
        labels.arm_name(settings, every),
        labels.other_name(settings, every),
        trials,
        {c: line for c, line in lines.items() if any(m is not None for m in line.mean)},
        spectra_of(trials, time_name),
        time_name,
    )


def _along_axes(
    lines: dict[str, Line], trials: Sequence[Trial], time_name: str
) -> dict[str, Line]:
    """What arms are compared by, over the seconds and bytes of a loop of one's own."""
    there = {name for trial in trials for row in trial.rows for name in row}
    return {
        Metric(column, "", along=axis).key: along(
            lines[column], line_of(trials, time_name, _reader(name))
        )
        for name, axis in AXES.items()
        if name in there
        for column in COMPARED
        if column in lines
    }


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
    if "signal_to_noise" in columns:
        columns -= {"signal", "noise"}  # of .stats: their ratio is drawn
    filters = not labels.is_plain(trials[0].settings)
    return sorted(columns | ({REMOVED} if filters else set()))


def _reader(column: str) -> Callable[[Row], float]:
    if column == REMOVED:
        return lambda row: 1 - number(row.get("kept_norm"))
    return lambda row: number(row.get(column))
