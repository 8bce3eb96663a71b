"""Learning curves with and without the filter: how they are drawn and judged.

The rows hold one pair of arms a seed. In the arm called plain the tracker only watches,
so that the fraction is known there too. Whether the fraction follows the training loss
is told by Spearman's ρ. Over a whole run two curves that both fall have a large ρ
whatever binds them. So it is told of two parts as well: from where the tracker has
settled on, and of the changes from one epoch to the next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import (
    Claim,
    Finding,
    below,
    claim,
    correlated,
    missing,
    paired,
)
from dome_lab.paper.drawing import name_of
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.statistics import (
    Array,
    averages,
    curves,
    ends,
    number,
    rank_correlation,
    select,
    stacked,
    student_band,
)
from dome_lab.paper.tuning import judge_equal_time, pace_of

FOLLOWS = 0.8  # rank correlation above which the fraction follows the loss
FEWEST_EPOCHS = 5  # that a rank correlation is worth computing for
SETTLED = 1500  # steps after which the tracker has found its directions
WHOLE, LATE, CHANGES = "whole run", f"from step {SETTLED:,} on", "first differences"


def follows(prefix: str, rows: Sequence[Row], part: str = WHOLE) -> Finding:
    """Spearman's ρ of fraction and loss, seed by seed, above ``FOLLOWS``.

    What it is for the averaged curves, as the paper has it, and for the other parts is
    told beside it.

    Args:
        prefix: What is put before its name.
        rows: Of unfiltered runs, others are left out.
        part: Of the curves: ``WHOLE``, ``LATE`` or ``CHANGES``.
    """
    name, plain = f"{prefix}Spearman's ρ", select(rows, arm=PLAIN)
    loss, fraction = (
        {seed: _parts(plain)[part](run) for seed, run in curves(plain, column).items()}
        for column in ("train_loss", "fraction")
    )
    num_points = min((len(run) for run in loss.values()), default=0)
    if num_points < FEWEST_EPOCHS:
        return replace(missing(name), words=f"{name}: {num_points} epochs are too few")
    values = [rank_correlation(fraction[seed], loss[seed]) for seed in loss]
    finding = correlated(name, values, num_points, FOLLOWS)
    told = {
        "averaged curves": rank_correlation(
            stacked(fraction).mean(axis=0), stacked(loss).mean(axis=0)
        )
    }
    if part == WHOLE:
        told |= {other: _mean_of_part(plain, other) for other in (CHANGES, LATE)}
    told = {what: rho for what, rho in told.items() if math.isfinite(rho)}
    words = [f"{rho:.3g} for {what}" for what, rho in told.items()]
    return replace(
        finding,
        numbers=finding.numbers | {f"{name}, {what}": r for what, r in told.items()},
        words=", ".join([finding.words, *words]),
    )


def _mean_of_part(rows: Sequence[Row], part: str) -> float:
    """Spearman's ρ of a part of both curves, mean over seeds; NaN if it is short."""
    cut = _parts(rows)[part]
    loss, fraction = curves(rows, "train_loss"), curves(rows, "fraction")
    found = [(cut(fraction[seed]), cut(loss[seed])) for seed in loss]
    if min(len(x) for x, _ in found) < FEWEST_EPOCHS:
        return math.nan
    return sum(rank_correlation(x, y) for x, y in found) / len(found)


def _parts(rows: Sequence[Row]) -> dict[str, Callable[[Array], Array]]:
    start = _settled(rows)
    return {
        WHOLE: lambda run: run,
        LATE: lambda run: run[start:],
        CHANGES: np.diff,
    }


def _settled(rows: Sequence[Row]) -> int:
    """How many epochs the first steps take; all if it is not known of how many."""
    num_train = rows[0].get("num_train") if rows else None
    if not isinstance(num_train, int):
        return len(rows)
    return math.ceil(SETTLED / (num_train // number(rows[0], "batch_size")))


LOSS_MARGIN = 0.05  # of the plain loss
SCORE_MARGIN = 0.02  # accuracy or macro-F1
MOST = 0.5  # of ‖g‖: if less than this is kept, most of it is removed
SCORES = {"test_accuracy": "test accuracy", "test_macro_f1": "macro-F1"}


def both_arms(run: Run, num_seeds: int) -> list[Run]:
    """The filtered run and the one that only watches, for every seed."""
    return [
        replace(run, seed=seed, removes=removes)
        for removes in ("span", "nothing")
        for seed in range(num_seeds)
    ]


def dynamics_runs(config: Repeated) -> list[Run]:
    """Both arms of every seed, and the run that tells what the filter costs."""
    runs = both_arms(config.run, config.num_seeds)
    if config.paced_epochs:
        runs.append(replace(config.run, epochs=config.paced_epochs, paced=True))
    return runs


@dataclass(frozen=True, kw_only=True)
class Momenta:
    """Settings: momentum as torch sums it, and as the paper averages it.

    Attributes:
        run: A run of it.
        optimizers: "sgd" is torch's, "ema" that of the paper's Algorithm 1.
        num_seeds: How many seeds.
        paced_epochs: As of ``Repeated``, for each optimizer.
    """

    run: Run
    optimizers: tuple[str, ...] = ("sgd", "ema")
    num_seeds: int = 5
    paced_epochs: int = 0


def momenta_runs(config: Momenta) -> list[Run]:
    """Both arms of every seed, with each momentum."""
    return [
        run
        for optimizer in config.optimizers
        for run in dynamics_runs(_repeated(config, optimizer))
    ]


def _repeated(config: Momenta, optimizer: str) -> Repeated:
    return Repeated(
        run=replace(config.run, optimizer=optimizer),
        num_seeds=config.num_seeds,
        paced_epochs=config.paced_epochs,
    )


def momenta_parts(config: Momenta) -> list[Momenta]:
    """Each momentum for itself."""
    return [replace(config, optimizers=(name,)) for name in config.optimizers]


def draw_dynamics(rows: Sequence[Row], paper: Run, score: str) -> Figure:
    """Training loss, fraction and score by epoch, side by side; a row an optimizer."""
    rows = judged(rows)
    groups = _by_optimizer(rows)
    figure, grid = drawing.canvas(len(groups), 3, drawing.PAGE, 0.8 + 1.9 * len(groups))
    for axes, (optimizer, mine) in zip(grid, groups.items(), strict=True):
        draw_panels(axes, mine, score)
        if len(groups) > 1:
            drawing.name_row(axes[0], name_of(optimizer))
    drawing.add_title(figure, rows, grid[0][0])
    drawing.add_note(
        figure,
        drawing.statistics_note(rows),
        drawing.scale_note(rows, paper, varied=["optimizer"] * (len(groups) > 1)),
    )
    return figure


def draw_panels(
    axes: Sequence[Axes], rows: Sequence[Row], score: str, *, watched: bool = True
) -> None:
    """The panels of one pair of arms.

    Args:
        axes: Three, or two where nothing watched the unfiltered arm.
        rows: Of both arms.
        score: Column of what is to be high.
        watched: Whether the fraction is known of both arms.
    """
    panels = {"train_loss": "training loss"}
    if watched:
        panels["fraction"] = "norm fraction\nin span(U)"
    panels[score] = SCORES[score]
    for one, (column, title) in zip(axes, panels.items(), strict=True):
        found = {
            arm: stacked(curves(select(rows, arm=arm), column))
            for arm in (PLAIN, FILTERED)
        }
        for arm, values in found.items():
            epochs = np.arange(1, values.shape[1] + 1)
            one.plot(epochs, values.T, color=drawing.COLOURS[arm], **drawing.SEED)
        seen = one.get_ylim()
        for arm, values in found.items():
            epochs = np.arange(1, values.shape[1] + 1)
            drawing.draw_band(one, epochs, student_band(values), arm)
        # The interval of three seeds would else decide what can be seen.
        one.set_ylim(seen)
        drawing.label(one, "epoch", title)
        drawing.epochs_below(one)


def judge_dynamics(figure: str, rows: Sequence[Row], score: str) -> list[Claim]:
    """Convergence, and what the fraction does, with each optimizer for itself.

    With a paced run, what the filter adds in as many seconds too.
    """
    claims = []
    for optimizer, mine in _by_optimizer(rows).items():
        both, paced = judged(mine), select(mine, paced=True)
        group = {"": both}
        found = [
            *judge_convergence(figure, group, score),
            *(judge_equal_time(figure, both, pace_of(paced), score) if paced else []),
            *judge_fraction(figure, group),
        ]
        # Torch's momentum is what everybody takes it for; the other one is named.
        where = f"{name_of(optimizer)}: " if optimizer == "ema" else ""
        claims += [replace(one, name=f"{where}{one.name}") for one in found]
    return claims


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows of both arms: a paced run is of neither."""
    return select(rows, paced=False)


def _by_optimizer(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = dict.fromkeys(str(row["optimizer"]) for row in rows)
    return {name: select(rows, optimizer=name) for name in found}


def judge_convergence(
    figure: str, groups: dict[str, list[Row]], score: str
) -> list[Claim]:
    """Whether filtering slows training down: one claim on loss, one on the score.

    Args:
        figure: Short name of the figure.
        groups: The rows that belong together, by what is said of them ("" or
            "B = 4: ").
        score: The column of the score.
    """
    name = SCORES[score]
    losses = [f for prefix, rows in groups.items() for f in _losses(prefix, rows)]
    scores = [
        f for prefix, rows in groups.items() for f in _scores(prefix, rows, score)
    ]
    everywhere = ", at every batch size" if len(groups) > 1 else ""
    return [
        claim(
            figure,
            "does not slow convergence: training loss",
            "With the filter the training loss, mean over epochs and at the end, is "
            f"at most {LOSS_MARGIN:.0%} above that without{everywhere}.",
            losses,
        ),
        claim(
            figure,
            f"does not slow convergence: {name}",
            f"With the filter the {name}, mean over epochs and at the end, is at most "
            f"{SCORE_MARGIN} below that without{everywhere}.",
            scores,
        ),
    ]


def judge_fraction(figure: str, groups: dict[str, list[Row]]) -> list[Claim]:
    """Whether the fraction follows the training loss, and how large it is."""
    return [
        *judge_course(figure, groups),
        claim(
            figure,
            "most of the norm is removed",
            f"Less than {MOST} of the batch gradient's norm is kept, mean over "
            f"epochs{_everywhere(groups)}.",
            [_kept(prefix, rows) for prefix, rows in groups.items()],
        ),
    ]


def judge_course(figure: str, groups: dict[str, list[Row]]) -> list[Claim]:
    """Whether the fraction follows the loss, and is higher in filtered runs."""
    everywhere = _everywhere(groups)
    return [
        claim(
            figure,
            "fraction follows loss",
            "Along the unfiltered run, Spearman's ρ over epochs of fraction and "
            f"training loss is above {FOLLOWS}{everywhere}.",
            [follows(prefix, rows) for prefix, rows in groups.items()],
        ),
        claim(
            figure,
            "fraction higher in filtered runs",
            "Before filtering, the fraction of filtered runs, mean over epochs, is "
            f"above that of unfiltered ones{everywhere}.",
            [_higher(prefix, rows) for prefix, rows in groups.items()],
        ),
    ]


def _everywhere(groups: dict[str, list[Row]]) -> str:
    return " at every batch size" if len(groups) > 1 else ""


def judge_similar_end(figure: str, rows: Sequence[Row], score: str) -> Claim:
    """Whether both arms end with a similar score."""
    name = SCORES[score]
    return claim(
        figure,
        f"{name} becomes similar",
        f"After the last epoch the {name} of both arms differs by less than "
        f"{SCORE_MARGIN}.",
        [
            paired(
                f"change of the last {name}",
                ends(select(rows, arm=FILTERED), score),
                ends(select(rows, arm=PLAIN), score),
                -SCORE_MARGIN,
                SCORE_MARGIN,
            )
        ],
    )


def _losses(prefix: str, rows: Sequence[Row]) -> list[Finding]:
    plain, filtered = select(rows, arm=PLAIN), select(rows, arm=FILTERED)
    return [
        paired(
            f"{prefix}relative change of the {when} loss",
            value(filtered, "train_loss"),
            value(plain, "train_loss"),
            high=LOSS_MARGIN,
            relative=True,
        )
        for when, value in (("mean", averages), ("last", ends))
    ]


def _scores(prefix: str, rows: Sequence[Row], score: str) -> list[Finding]:
    plain, filtered = select(rows, arm=PLAIN), select(rows, arm=FILTERED)
    return [
        paired(
            f"{prefix}change of the {when} {SCORES[score]}",
            value(filtered, score),
            value(plain, score),
            low=-SCORE_MARGIN,
        )
        for when, value in (("mean", averages), ("last", ends))
    ]


def _higher(prefix: str, rows: Sequence[Row]) -> Finding:
    return paired(
        f"{prefix}change of the fraction",
        averages(select(rows, arm=FILTERED), "fraction"),
        averages(select(rows, arm=PLAIN), "fraction"),
        low=0,
    )


def _kept(prefix: str, rows: Sequence[Row]) -> Finding:
    kept = averages(select(rows, arm=FILTERED), "kept_norm")
    return below(f"{prefix}kept of the norm", list(kept.values()), MOST)
