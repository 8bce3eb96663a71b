"""With and without the filter, each at the learning rate that is best for it.

Beyond the paper, on fig03's and fig07's question, which compares both arms at one
learning rate. Here the learning rate of each arm and compression rate is chosen on
validation samples with seeds that are not judged (``tuning.py``), and the arms are
compared three ways: after as many epochs, and so as many bytes; after as many seconds,
the unfiltered arm training on for the time that the filter costs, at the learning rate
that is best then; and along the way, by bytes and by seconds.

Scale cpu: MNIST with 6,000 images and CIFAR-10 with 5,000, B = 128, 10 epochs, 5 judged
seeds. Adam at rates none, 10, 100 and 1,000; SGD with momentum at none and 100.

Scale full: fig06's run, SGD without momentum on DBPedia, B = 512, 5 epochs, with 16,000
texts; of the 18,224 at hand the others are for validation. About four hours of a core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.figures import Found
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.figures import fig06_dbpedia_dynamics as fig06
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, TEST, Run
from dome_lab.paper.statistics import number, select
from dome_lab.paper.tuning import (
    Case,
    Grid,
    cases_of,
    draw_ends,
    draw_way,
    equal_epochs,
    first_trials,
    search,
    trial,
)

PAPER = fig03.PAPER
MNIST = replace(PAPER, num_train=6000, num_test=2000, epochs=10)
CIFAR = replace(MNIST, task="cifar10", num_train=5000)
RATES = (100, None, 10, 1000)  # from the most to the least telling


def with_sgd(run: Run) -> Run:
    """The same run with SGD and momentum."""
    return replace(run, optimizer="sgd", momentum=0.9)


def cases(mnist: Run, cifar: Run) -> tuple[Run, ...]:
    """The filtered arm of every comparison, in the order in which they are made."""
    of_mnist = [replace(mnist, rate=rate) for rate in RATES]
    of_cifar = [replace(cifar, rate=rate) for rate in RATES]
    by_sgd = [with_sgd(run) for run in (*of_mnist[:2], *of_cifar[:2])]
    return (*of_mnist, *of_cifar, *by_sgd)


ADAM = Grid()
SGD = Grid(rates=(1e-2, 3e-2, 1e-1, 3e-1))
# Of a data set that is all trained on nothing is left for validation.
ALL_CASES = cases(
    replace(PAPER, num_train=50_000),
    replace(PAPER, task="cifar10", num_train=40_000),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: the filtered arms, the learning rates tried, how many seeds judged."""

    cases: tuple[Run, ...] = ALL_CASES
    adam: Grid = ADAM
    sgd: Grid = SGD
    num_seeds: int = 5


_VARIED = ["lr", "epochs", "momentum", "update_every"]
_SMALL = Grid(rates=(1e-3, 3e-3), seeds=(100,), most_beyond=1)
_DIGITS = replace(fig03.SCALES["smoke"].run, rate=100)
SCALES = {
    "paper": Config(),
    "cpu": Config(cases=cases(MNIST, CIFAR)),
    "full": Config(
        cases=(replace(fig06.PAPER, num_train=16_000, num_test=2000),),
        sgd=Grid(rates=(0.1, 0.3, 1.0)),
    ),
    "smoke": Config(
        cases=(_DIGITS, replace(_DIGITS, rate=None)),
        adam=_SMALL,
        sgd=_SMALL,
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """What both arms of each case take, and the filtered arm's first trials."""
    return [
        run
        for case in config.cases
        for run in (
            _timed_plain(case, config),
            *first_trials(case, _grid(case, config)),
        )
    ]


def later_runs(config: Config, found: Found) -> list[Run]:
    """Trials of both arms, and what is judged where these are over."""
    return [run for case in config.cases for run in _later(case, config, found)]


def parts(config: Config) -> list[Config]:
    """Every case for itself."""
    return [replace(config, cases=(case,)) for case in config.cases]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rate, and along the way by bytes and by seconds."""
    return draw_tuned(rows)


def judge(rows: Sequence[Row]) -> list[Claim]:
    """For each case: after as many bytes, after as many seconds, along the way."""
    return [one for case in cases_of(rows) for one in judge_case("ext04", case)]


def draw_tuned(rows: Sequence[Row], note: str = "") -> Figure:
    """A row of panels for each task and optimizer; the note is a sentence."""
    found = cases_of(rows)
    groups = list(dict.fromkeys(case.group for case in found))
    height = 2.4 * len(groups) + 0.9
    figure, panels = drawing.canvas(len(groups), 3, drawing.PAGE, height)
    for line, group in zip(panels, groups, strict=True):
        mine = [case for case in found if case.group == group]
        draw_ends(line[0], mine)
        draw_way(line[1], mine, "gradients")
        draw_way(line[2], mine, "seconds")
        drawing.name_row(line[0], group)
    judged = select(rows, split=TEST)
    _add_legend(figure, panels[0][0])
    drawing.add_note(
        figure,
        drawing.statistics_note(judged, "bars"),
        "Learning rates chosen for each arm on validation samples, by other seeds.",
        f"{note} {drawing.extension_note(judged, varied=_VARIED)}".strip(),
    )
    return figure


def judge_case(figure: str, case: Case) -> list[Claim]:
    """After as many bytes, after as many seconds, along the way."""
    rates = (
        f"Learning rate {case.rate_of(FILTERED):g} with the filter, "
        f"{case.rate_of(PLAIN):g} without, {case.rate_of(PLAIN, long=True):g} for "
        f"{case.long_epochs} epochs."
    )
    return [
        claim(
            figure,
            f"{case.name}: ahead after as many bytes",
            f"After {case.epochs} epochs, each arm at its own best learning rate, the "
            "filter adds to test accuracy.",
            [paired("gain", case.filtered_ends(), case.plain_ends(), low=0)],
            rates,
        ),
        claim(
            figure,
            f"{case.name}: ahead after as many seconds",
            f"When the unfiltered arm trains on for as long as the filtered one takes, "
            f"{case.long_epochs} epochs, the filter still adds to test accuracy.",
            [paired("gain", case.filtered_ends(), case.plain_ends(long=True), low=0)],
            rates,
        ),
        claim(
            figure,
            f"{case.name}: ahead along the way",
            "Test accuracy, averaged over the bytes sent and over the seconds taken, "
            "is higher with the filter.",
            [
                paired("by bytes", *case.averages(), low=0),
                paired("by seconds", *case.averages(long=True), low=0),
            ],
        ),
    ]


def _grid(case: Run, config: Config) -> Grid:
    return config.adam if case.optimizer == "adam" else config.sgd


def _timed_plain(case: Run, config: Config) -> Run:
    """The unfiltered counterpart of the filtered arm's first trial."""
    grid = _grid(case, config)
    return trial(replace(case, rank=None), grid.rates[0], grid.seeds[0])


def _later(case: Run, config: Config, found: Found) -> list[Run]:
    grid, quick = _grid(case, config), _timed_plain(case, config)
    slow = replace(quick, rank=case.rank)
    best = search(case, grid, found, case.epochs)
    wanted = best if isinstance(best, list) else _judged(case, best, config)
    if not found.keys() >= {quick, slow}:
        return wanted
    # One after the other on one machine: these rows are older than paced runs.
    pace = _median_seconds(found[slow]) / _median_seconds(found[quick])
    epochs = equal_epochs(case.epochs, pace)
    long = replace(case, rank=None, epochs=epochs)
    # Without a schedule a longer run begins with the shorter one, so these trials
    # tell the best learning rate of both.
    early = search(long, grid, found, case.epochs)
    late = search(long, grid, found, epochs)
    if isinstance(early, list) or isinstance(late, list):
        trials = [one for one in (early, late) if isinstance(one, list)]
        return [*wanted, *chain.from_iterable(trials)]
    wanted = [*wanted, *_judged(long, late, config)]
    if early != late:
        wanted += _judged(replace(long, epochs=case.epochs), early, config)
    return wanted


def _median_seconds(rows: Sequence[Row]) -> float:
    return median(number(row, "processor_seconds") for row in rows)


def _judged(run: Run, rate: float, config: Config) -> list[Run]:
    seeds = range(config.num_seeds)
    return [replace(run, lr=rate, seed=seed, split=TEST) for seed in seeds]


def _add_legend(figure: Figure, axes: Axes) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        fontsize=drawing.TEXT - 1,
        frameon=False,
    )
