"""Columns of several seeds as one line with an interval.

Shapes: S seeds, X places on the horizontal axis. Lines are means over seeds with 95 %
Student t intervals, at every place by itself. Where a seed has no number (it diverged,
or nothing was measured) there is no mean: a mean of the others would flatter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dome_lab.paper.rows import Row
from dome_lab.paper.statistics import student_interval
from dome_lab.report.sources import Trial

FEWEST_SEEDS = 3  # for an interval
MOST_POINTS = 500  # of a line; longer ones are averaged over neighbours
LARGEST = 1e150
MOST_SPECTRA = 50  # of more, evenly spaced ones are shown

Number = float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A mean over seeds by place, shape (X,) each; no ends with one or two seeds."""

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
    ends = ([end[i] for i in kept] for end in (line.mean, line.low, line.high))
    return Line([float(at[line.x[i]] or 0.0) for i in kept], *ends)


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
    return line


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
    return Line(line.x, *map(_powers, (line.mean, line.low, line.high)))


def _powers(logs: Sequence[Number]) -> list[Number]:
    return [None if log is None else 10**log for log in logs]
