"""Too many directions on little data: test accuracy by rank, each rank tuned.

Beyond the paper, which takes k = C², the square of the number of classes. MNIST shows
no harm in that. Here are three other problems, with few samples and some 200 steps of
B = 32, as in fine-tuning. Each rank and the unfiltered arm have the learning rate that
is best for them, chosen on validation samples by other seeds as in ext04. They are
compared after as many epochs and after as many seconds, for which the unfiltered arm
trains on.

Scale cpu: 1,280 training samples, 5 epochs, Adam, ranks C², C, 3 C and C/3, 5 judged
seeds, of CIFAR-10 and 20 classes of Tiny ImageNet with ResNet-8, and of 9 classes of
DBPedia-Classes with the Transformer. About four hours of one core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import draw_points, subset_name
from dome_lab.paper.figures import Found
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, TEST, Run, Value
from dome_lab.paper.statistics import distinct, ends, select
from dome_lab.paper.tolerance import EQUAL
from dome_lab.paper.tuning import (
    COLOURS,
    LONG,
    MARKERS,
    NAMES,
    Grid,
    equal_epochs,
    pace_of,
    search,
    trial,
)

PACED_EPOCHS = 3  # of the runs that tell what a rank costs
CIFAR = Run(
    task="cifar10",
    model="resnet8",
    seed=0,
    batch_size=32,
    epochs=5,
    optimizer="adam",
    lr=1e-3,
    num_train=1280,
    num_test=400,
    num_classes=10,
)
TINY = replace(CIFAR, task="tiny_imagenet", num_classes=20)
DBPEDIA = replace(CIFAR, task="dbpedia", model="transformer", num_classes=9)
ADAM = Grid(rates=(1e-3, 3e-3, 1e-2))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: the unfiltered runs, learning rates tried, and how many seeds."""

    problems: tuple[Run, ...] = (CIFAR, DBPEDIA, TINY)
    grid: Grid = ADAM
    num_seeds: int = 5


_DIGITS = replace(CIFAR, task="digits", num_train=64, num_test=60, num_classes=4)
SCALES = {
    "paper": Config(),
    "cpu": Config(),
    "smoke": Config(
        problems=(replace(_DIGITS, epochs=3),),
        grid=Grid(rates=(1e-3,), seeds=(100,), most_beyond=0),
        num_seeds=2,
    ),
}


def ranks_of(num_classes: int) -> tuple[int, ...]:
    """The ranks that are compared, from the most to the least telling."""
    C = num_classes
    return tuple(dict.fromkeys((C**2, C, 3 * C, max(1, C // 3))))


def arms(problem: Run) -> list[Run]:
    """The filtered arms of a problem."""
    return [replace(problem, rank=rank) for rank in ranks_of(problem.num_classes or 1)]


def runs(config: Config) -> list[Run]:
    """Short runs that tell what each rank costs."""
    return [_paced(arm, config) for problem in config.problems for arm in arms(problem)]


def later_runs(config: Config, found: Found) -> list[Run]:
    """Trials of all arms, and what is judged where these are over."""
    wanted: list[Run] = []
    for problem in config.problems:
        for run in (problem, *arms(problem)):
            best = search(run, config.grid, found, run.epochs)
            wanted += _trials_or_judged(run, best, config)
        paced = [_paced(arm, config) for arm in arms(problem)]
        if not found.keys() >= set(paced):
            continue
        paces = [pace_of(found[run]) for run in paced]
        lengths = {equal_epochs(problem.epochs, pace) for pace in paces}
        for epochs in sorted(lengths):
            long = replace(problem, epochs=epochs)
            best = search(long, config.grid, found, epochs)
            wanted += _trials_or_judged(long, best, config)
    return wanted


def parts(config: Config) -> list[Config]:
    """Each problem on its own."""
    return [replace(config, problems=(problem,)) for problem in config.problems]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rank, a panel for each problem."""
    problems = _problems(rows)
    figure, (axes,) = drawing.canvas(1, len(problems), drawing.PAGE, 3.0)
    for one, (name, mine) in zip(axes, problems.items(), strict=True):
        _draw_problem(one, mine)
        one.set_title(name, fontsize=drawing.TEXT)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        fontsize=drawing.TEXT - 1,
        frameon=False,
    )
    judged = select(rows, split=TEST)
    drawing.add_note(
        figure,
        drawing.statistics_note(judged, "bars"),
        "Learning rates chosen for each arm on validation samples, by other seeds. "
        + drawing.extension_note(judged, varied=["lr", "epochs", "num_classes"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Each rank after as many epochs and seconds, and whether C² is one too many."""
    claims = []
    for name, mine in _problems(rows).items():
        classes = int(str(mine[0]["num_classes"]))
        for rank in ranks_of(classes):
            claims += _judge_rank(f"{name}, k = {rank}", mine, rank)
        square, few = (_ends(mine, rank) for rank in ranks_of(classes)[:2])
        claims.append(
            claim(
                "ext17",
                f"{name}: C² directions are as good as C",
                f"Test accuracy with k = C² is at most {EQUAL} below that with k = C.",
                [paired("change", square, few, low=-EQUAL)],
            )
        )
    return claims


def _judge_rank(name: str, rows: Sequence[Row], rank: int) -> list[Claim]:
    epochs = _equal_epochs(rows, rank)
    return [
        claim(
            "ext17",
            f"{name}: {where}",
            f"{text} the filter adds to test accuracy, each arm at its own learning "
            "rate.",
            [paired("gain", _ends(rows, rank), plain, low=0)],
        )
        for where, text, plain in (
            ("ahead after as many epochs", "After as many epochs", _ends(rows, None)),
            (
                "ahead after as many seconds",
                f"When the unfiltered arm trains for as many seconds, {epochs} epochs,",
                _ends(rows, None, epochs),
            ),
        )
    ]


def _draw_problem(axes: Axes, rows: Sequence[Row]) -> None:
    ranks = sorted({int(rank) for rank in distinct(rows, "rank")})
    lines: dict[str, list[tuple[int | None, int | None]]] = {
        FILTERED: [(rank, None) for rank in ranks],
        PLAIN: [(None, None) for _ in ranks],
        LONG: [(None, _equal_epochs(rows, rank)) for rank in ranks],
    }
    for shift, (arm, places) in zip((1.0, 0.94, 1.06), lines.items(), strict=True):
        draw_points(
            axes,
            list(shift * np.asarray(ranks)),
            [list(_ends(rows, *place).values()) for place in places],
            COLOURS[arm],
            marker=MARKERS[arm],
            label=NAMES[arm],
        )
    drawing.log_below(axes, ranks, {})
    drawing.label(axes, "number of directions k", "test accuracy")


def _problems(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each problem by its name."""
    kinds = dict.fromkeys((row["task"], row["num_classes"]) for row in rows)
    return {
        subset_name(task, classes): select(rows, task=task, num_classes=classes)
        for task, classes in kinds
    }


def _ends(
    rows: Sequence[Row], rank: Value, epochs: int | None = None
) -> dict[int, float]:
    """Test accuracy of the judged runs of an arm by seed.

    Args:
        rows: Of one problem.
        rank: Of the arm; None is the unfiltered one.
        epochs: How many it trained; None: as many as the filtered arms.
    """
    judged = select(rows, split=TEST)
    usual = next(row["epochs"] for row in judged if row["arm"] == FILTERED)
    mine = select(judged, rank=rank, epochs=usual if epochs is None else epochs)
    return ends(mine, "test_accuracy")


def _equal_epochs(rows: Sequence[Row], rank: int) -> int:
    """For how many epochs the unfiltered arm trains in the time of a rank's runs."""
    judged = select(rows, split=TEST, rank=rank)
    pace = pace_of(select(rows, rank=rank, paced=True))
    return equal_epochs(int(str(judged[0]["epochs"])), pace)


def _paced(run: Run, config: Config) -> Run:
    first = trial(run, config.grid.rates[0], config.grid.seeds[0])
    return replace(first, epochs=PACED_EPOCHS, paced=True)


def _trials_or_judged(run: Run, best: float | list[Run], config: Config) -> list[Run]:
    """The trials still wanted; without any, the judged runs at the best rate."""
    if isinstance(best, list):
        return best
    return [
        replace(run, lr=best, seed=seed, split=TEST) for seed in range(config.num_seeds)
    ]
