"""Learning curves with and without the filter: how they are drawn and judged.

The rows hold one pair of arms a seed. In the arm called plain the tracker only watches,
so that the fraction is known there too.
"""

from collections.abc import Sequence
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
    paired,
)
from dome_lab.paper.equal_time import judge_equal_time
from dome_lab.paper.following import FOLLOWS, follows
from dome_lab.paper.names import name_of
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.series import (
    averages,
    curves,
    ends,
    select,
    stacked,
)
from dome_lab.paper.statistics import student_band

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
    """Both arms of every seed, and the timed run."""
    runs = both_arms(config.run, config.num_seeds)
    if config.timed_epochs:
        runs.append(replace(config.run, rank=None, epochs=config.timed_epochs))
    return runs


@dataclass(frozen=True, kw_only=True)
class Momenta:
    """Settings: momentum as torch sums it, and as the paper averages it.

    Attributes:
        run: A run of it.
        optimizers: "sgd" is torch's, "ema" that of the paper's Algorithm 1.
        num_seeds: How many seeds.
        timed_epochs: As of ``Repeated``, for each optimizer.
    """

    run: Run
    optimizers: tuple[str, ...] = ("sgd", "ema")
    num_seeds: int = 5
    timed_epochs: int = 0


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
        timed_epochs=config.timed_epochs,
    )


def momenta_parts(config: Momenta) -> list[Momenta]:
    """Each momentum for itself."""
    return [replace(config, optimizers=(name,)) for name in config.optimizers]


def draw_dynamics(rows: Sequence[Row], paper: Run, score: str) -> Figure:
    """Training loss, fraction and score by epoch, side by side; a row an optimizer."""
    rows = watched(rows)
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

    With a timed run, what the filter adds in as many seconds too.
    """
    claims = []
    for optimizer, mine in _by_optimizer(rows).items():
        both, timed = watched(mine), select(mine, rank=None)
        group = {"": both}
        found = [
            *judge_convergence(figure, group, score),
            *(judge_equal_time(figure, both, timed, score) if timed else []),
            *judge_fraction(figure, group),
        ]
        # Torch's momentum is what everybody takes it for; the other one is named.
        where = f"{name_of(optimizer)}: " if optimizer == "ema" else ""
        claims += [replace(one, name=f"{where}{one.name}") for one in found]
    return claims


def watched(rows: Sequence[Row]) -> list[Row]:
    """The rows of runs with a tracker: the timed run has none."""
    return [row for row in rows if row["rank"] is not None]


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
