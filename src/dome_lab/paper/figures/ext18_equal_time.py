"""What pays in equal time: a basis that is updated seldom, each arm tuned as in ext04.

Beyond the paper. ext04 updates the basis at every step, which costs 1.9 to 2.5 plain
steps. Here it is updated at every 5th, 10th or 20th step, with 10, 20 or 100
directions. One setting is chosen for all problems: on the validation samples of the
first two, by a seed that is not judged, each at the learning rate that ext04 found for
the filter. Of settings within 0.02 of the best mean accuracy it is the one with the
fewest directions per step, k / update_every. On every problem that setting is then
compared with the unfiltered arm as in ext04: after as many epochs, and so as many
bytes; after as many seconds; and along the way.

Scale cpu: ext04's MNIST and CIFAR-10 at rates 100 and 1,000 with Adam, CIFAR-10 with
SGD and momentum uncompressed, and the Transformer on 6,000 texts of DBPedia at rate 100
with Adam, B = 64; 5 judged seeds. About three and a half hours of one core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from dome_lab.paper import train
from dome_lab.paper.claims import Claim
from dome_lab.paper.figures import Found
from dome_lab.paper.figures import ext04_tuned as ext04
from dome_lab.paper.figures import fig06_dbpedia_dynamics as fig06
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, TEST, Run
from dome_lab.paper.statistics import number, select
from dome_lab.paper.tolerance import EQUAL
from dome_lab.paper.tuning import (
    Grid,
    cases_of,
    equal_epochs,
    first_trials,
    pace_of,
    search,
    trial,
)

PACED_EPOCHS = 5  # of the run that tells what the filter costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One comparison.

    Attributes:
        case: A filtered run whose basis is updated at every step.
        grid: Learning rates that are tried.
        plain_epochs: Epochs of the unfiltered trials. These are ext04's, so that its
            rows are used again.
    """

    case: Run
    grid: Grid = ext04.ADAM
    plain_epochs: int


def problems(mnist: Run, cifar: Run, dbpedia: Run) -> tuple[Problem, ...]:
    """The comparisons, in the order in which they are made."""
    by_sgd = replace(ext04.with_sgd(cifar), rate=None)
    return (
        Problem(case=replace(mnist, rate=100), plain_epochs=19),
        Problem(case=replace(cifar, rate=100), plain_epochs=19),
        Problem(case=replace(mnist, rate=1000), plain_epochs=22),
        Problem(case=replace(cifar, rate=1000), plain_epochs=18),
        Problem(case=by_sgd, grid=ext04.SGD, plain_epochs=18),
        Problem(
            case=dbpedia,
            grid=Grid(rates=(3e-4, 1e-3, 3e-3)),
            plain_epochs=2 * dbpedia.epochs,
        ),
    )


TEXTS = replace(
    fig06.PAPER,
    optimizer="adam",
    lr=1e-3,
    rank=100,
    rate=100,
    num_train=6000,
    num_test=2000,
    batch_size=64,
    epochs=10,
)
ALL = problems(
    replace(ext04.PAPER, num_train=50_000),
    replace(ext04.PAPER, task="cifar10", num_train=40_000),
    replace(TEXTS, num_train=None, num_test=None),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings.

    Attributes:
        problems: What is judged.
        screened: On which the setting is chosen.
        update_every: Steps from one update of the basis to the next, above 1; all are
            tried with all ranks.
        ranks: Numbers of directions.
        num_seeds: How many are judged.
    """

    problems: tuple[Problem, ...] = ALL
    screened: tuple[Problem, ...] = ALL[:2]
    update_every: tuple[int, ...] = (5, 10, 20)
    ranks: tuple[int, ...] = (10, 20, 100)
    num_seeds: int = 5


_CPU = problems(ext04.MNIST, ext04.CIFAR, TEXTS)
_SMOKE = Problem(
    case=ext04.SCALES["smoke"].cases[0],
    grid=Grid(rates=(1e-3,), seeds=(100,), most_beyond=0),
    plain_epochs=2,
)
SCALES = {
    "paper": Config(),
    "cpu": Config(problems=_CPU, screened=_CPU[:2]),
    "smoke": Config(
        problems=(_SMOKE,),
        screened=(_SMOKE,),
        update_every=(2,),
        ranks=(2, 4),
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """The trials of the filter at every step, whose learning rate the settings have."""
    return [run for p in config.screened for run in first_trials(p.case, p.grid)]


def later_runs(config: Config, found: Found) -> list[Run]:
    """Every setting on the screened problems, then the chosen one against none."""
    screening = [_screening(problem, config, found) for problem in config.screened]
    wanted = [run for some in screening for run in some]
    if any(run.update_every == 1 or run not in found for run in wanted):
        return wanted
    steps, rank = _chosen(wanted, found)
    for problem in config.problems:
        case = replace(problem.case, update_every=steps, rank=rank)
        wanted += _compared(replace(problem, case=case), config.num_seeds, found)
    return wanted


def parts(config: Config) -> list[Config]:
    """Each problem on its own."""
    return [replace(config, problems=(problem,)) for problem in config.problems]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rate, and along the way by bytes and by seconds."""
    return ext04.draw_tuned(rows, _setting_of(rows))


def judge(rows: Sequence[Row]) -> list[Claim]:
    """For each problem: after as many bytes, after as many seconds, along the way."""
    claims = [one for case in cases_of(rows) for one in ext04.judge_case("ext18", case)]
    setting = _setting_of(rows)
    return [replace(one, statement=f"{one.statement} {setting}") for one in claims]


def _screening(problem: Problem, config: Config, found: Found) -> list[Run]:
    """A trial of every setting; before that, those that tell the learning rate."""
    case, grid = problem.case, problem.grid
    rate = search(case, grid, found, case.epochs)
    if isinstance(rate, list):
        return rate
    return [
        trial(replace(case, update_every=steps, rank=rank), rate, grid.seeds[0])
        for steps, rank in product(config.update_every, config.ranks)
    ]


def _chosen(trials: Sequence[Run], found: Found) -> tuple[int, int]:
    """Of the settings near the best, the one with the fewest directions per step."""
    accuracies: dict[tuple[int, int], list[float]] = {}
    for run in trials:
        end = number(found[run][-1], "test_accuracy")
        accuracies.setdefault((run.update_every, run.rank or 0), []).append(end)
    means = {setting: fmean(values) for setting, values in accuracies.items()}
    near = [s for s in means if means[s] >= max(means.values()) - EQUAL]
    return min(near, key=lambda setting: (setting[1] / setting[0], -means[setting]))


def _compared(problem: Problem, num_seeds: int, found: Found) -> list[Run]:
    """Trials of both arms, and what is judged where these are over."""
    case, grid = problem.case, problem.grid
    plain = replace(case, rank=None, update_every=1)
    first = trial(case, grid.rates[0], grid.seeds[0])
    paced = replace(first, epochs=PACED_EPOCHS, paced=True)
    best = search(case, grid, found, case.epochs)
    wanted = [paced, *_trials_or_judged(case, best, num_seeds)]
    if paced not in found:
        return wanted
    epochs = equal_epochs(case.epochs, pace_of(found[paced]))
    long = replace(plain, epochs=max(epochs, problem.plain_epochs))
    early = search(long, grid, found, case.epochs)
    late = search(long, grid, found, epochs)
    # Without a schedule a longer run begins with the shorter one.
    wanted += _trials_or_judged(replace(long, epochs=epochs), late, num_seeds)
    if early != late:
        wanted += _trials_or_judged(plain, early, num_seeds)
    return wanted


def _trials_or_judged(run: Run, best: float | list[Run], num_seeds: int) -> list[Run]:
    """The trials still wanted; without any, the judged runs at the best rate."""
    if isinstance(best, list):
        return best
    return [replace(run, lr=best, seed=seed, split=TEST) for seed in range(num_seeds)]


def _setting_of(rows: Sequence[Row]) -> str:
    """The judged filter in a sentence."""
    row = select(rows, arm=FILTERED, split=TEST)[0]
    rank, steps = row["rank"], row["update_every"]
    return f"With the filter: k = {rank}, basis updated every {steps} steps."
