"""Learning curves with and without the filter: how they are drawn and judged.

The rows hold one pair of arms a seed. In the arm called plain the tracker only watches,
so that the fraction is known there too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.series import (
    Curves,
    averages,
    curves,
    ends,
    number,
    select,
    stacked,
)
from dome_lab.paper.statistics import Array, rank_correlation, student_band

LOSS_MARGIN = 0.05  # of the plain loss
SCORE_MARGIN = 0.02  # accuracy or macro-F1
FOLLOWS = 0.8  # rank correlation above which the fraction follows the loss
FEWEST_EPOCHS = 5  # that a rank correlation is worth computing for
MOST = 0.5  # of ‖g‖: if less than this is kept, most of it is removed
SETTLED = 1500  # steps after which ρ is told again: what the first ones do is left out
SCORES = {"test_accuracy": "test accuracy", "test_macro_f1": "macro-F1"}


def both_arms(run: Run, num_seeds: int) -> list[Run]:
    """The filtered run and the one that only watches, for every seed."""
    return [
        replace(run, seed=seed, removes=removes)
        for removes in ("span", "nothing")
        for seed in range(num_seeds)
    ]


def dynamics_runs(config: Repeated) -> list[Run]:
    """Both arms of every seed."""
    return both_arms(config.run, config.num_seeds)


def draw_dynamics(rows: Sequence[Row], paper: Run, score: str) -> Figure:
    """Training loss, fraction and score by epoch, side by side."""
    figure, (axes,) = drawing.canvas(1, 3, drawing.PAGE, 2.7)
    draw_panels(axes, rows, score)
    drawing.add_title(figure, rows, axes[0])
    drawing.add_note(
        figure,
        drawing.statistics_note(rows),
        drawing.scale_note(rows, paper),
    )
    return figure


def draw_panels(axes: Sequence[Axes], rows: Sequence[Row], score: str) -> None:
    """The three panels of one pair of arms."""
    panels = {
        "train_loss": "training loss",
        "fraction": "norm fraction\nin span(U)",
        score: SCORES[score],
    }
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
    """Convergence, and what the fraction does."""
    group = {"": list(rows)}
    return [
        *judge_convergence(figure, group, score),
        *judge_fraction(figure, group),
    ]


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
    everywhere = " at every batch size" if len(groups) > 1 else ""
    return [
        claim(
            figure,
            "fraction follows loss",
            "Along the unfiltered run, Spearman's ρ over epochs of fraction and "
            f"training loss is above {FOLLOWS}{everywhere}.",
            [_correlation(prefix, rows) for prefix, rows in groups.items()],
        ),
        claim(
            figure,
            "fraction higher in filtered runs",
            "Before filtering, the fraction of filtered runs, mean over epochs, is "
            f"above that of unfiltered ones{everywhere}.",
            [_higher(prefix, rows) for prefix, rows in groups.items()],
        ),
        claim(
            figure,
            "most of the norm is removed",
            f"Less than {MOST} of the batch gradient's norm is kept, mean over "
            f"epochs{everywhere}.",
            [_kept(prefix, rows) for prefix, rows in groups.items()],
        ),
    ]


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


def _correlation(prefix: str, rows: Sequence[Row]) -> Finding:
    """Seed by seed for the interval; the averaged curves' ρ, the paper's, beside it."""
    name, plain = f"{prefix}Spearman's ρ", select(rows, arm=PLAIN)
    loss, fraction = curves(plain, "train_loss"), curves(plain, "fraction")
    num_epochs = min((len(run) for run in loss.values()), default=0)
    if num_epochs < FEWEST_EPOCHS:
        return replace(missing(name), words=f"{name}: {num_epochs} epochs are too few")
    values = [rank_correlation(fraction[s], loss[s]) for s in loss]
    finding = correlated(name, values, num_epochs, FOLLOWS)
    averaged = rank_correlation(
        stacked(fraction).mean(axis=0), stacked(loss).mean(axis=0)
    )
    told = {
        "averaged curves": averaged,
        "first differences": _mean_correlation(fraction, loss, np.diff),
        f"from step {SETTLED:,} on": _mean_correlation(
            fraction, loss, lambda run: run[_settled(plain) :]
        ),
    }
    told = {what: rho for what, rho in told.items() if math.isfinite(rho)}
    words = [f"{rho:.3g} for {what}" for what, rho in told.items()]
    return replace(
        finding,
        numbers=finding.numbers | {f"{name}, {what}": r for what, r in told.items()},
        words=", ".join([finding.words, *words]),
    )


def _mean_correlation(
    fraction: Curves, loss: Curves, part: Callable[[Array], Array]
) -> float:
    """Spearman's ρ of a part of both curves, mean over seeds; NaN if it is short."""
    found = [(part(fraction[seed]), part(loss[seed])) for seed in loss]
    if min(len(x) for x, _ in found) < FEWEST_EPOCHS:
        return math.nan
    return sum(rank_correlation(x, y) for x, y in found) / len(found)


def _settled(rows: Sequence[Row]) -> int:
    """How many epochs the first steps take; all if it is not known of how many."""
    num_train, batch_size = rows[0].get("num_train"), number(rows[0], "batch_size")
    if not isinstance(num_train, int):
        return len(rows)
    return math.ceil(SETTLED / (num_train // batch_size))


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
