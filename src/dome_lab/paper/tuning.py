"""Learning rates chosen on validation samples, by seeds that are never judged.

The rates tried are 1, 3, 10, 30 ... times a power of ten: all of them with the first
seed, and the best two with the others, which decide. Where the best one lies at an end
of those tried, the next one beyond it is tried too.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import number, select
from dome_lab.paper.stages import Found

VALIDATION, TEST = "validation", "test"
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


def equal_epochs(slow: Sequence[Row], quick: Sequence[Row], epochs: int) -> int:
    """For how many epochs one run can train in the time that another takes.

    By the median epoch: the processor's seconds of an epoch vary with what else the
    machine does.

    Args:
        slow: Rows of the run that takes longer.
        quick: Rows of the other.
        epochs: How many epochs the slow one trains.
    """
    ratio = _median_seconds(slow) / _median_seconds(quick)
    return max(epochs, round(epochs * ratio))


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


def _median_seconds(rows: Sequence[Row]) -> float:
    return statistics.median(number(row, "processor_seconds") for row in rows)
