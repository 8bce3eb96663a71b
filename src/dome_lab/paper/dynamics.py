"""Learning curves with and without the filter: how they are drawn and judged.

The rows hold one pair of arms a seed. In the arm called plain the tracker only watches,
so that the fraction is known there too.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, Finding, above, claim, missing, paired
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.series import averages, curves, ends, select, stacked
from dome_lab.paper.statistics import bootstrap_band, rank_correlation

LOSS_MARGIN = 0.05  # of the plain loss
SCORE_MARGIN = 0.02  # accuracy or macro-F1
FOLLOWS = 0.8  # rank correlation above which the fraction follows the loss
FEWEST_EPOCHS = 5  # that a rank correlation is worth computing for
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


def draw_dynamics(
    rows: Sequence[Row], paper: Run, score: str, confidence: float
) -> Figure:
    """Training loss, fraction and score by epoch, side by side."""
    figure, (axes,) = drawing.canvas(1, 3, drawing.PAGE, 2.7)
    draw_panels(axes, rows, score, confidence)
    drawing.add_title(figure, rows, axes[0])
    drawing.add_notes(figure, rows, confidence, paper)
    return figure


def draw_panels(
    axes: Sequence[Axes], rows: Sequence[Row], score: str, confidence: float
) -> None:
    """The three panels of one pair of arms."""
    panels = {
        "train_loss": "training loss",
        "fraction": "norm fraction\nin span(U)",
        score: SCORES[score],
    }
    for one, (column, title) in zip(axes, panels.items(), strict=True):
        for arm in (PLAIN, FILTERED):
            values = stacked(curves(select(rows, arm=arm), column))
            epochs = np.arange(1, values.shape[1] + 1)
            drawing.draw_band(one, epochs, bootstrap_band(values, confidence), arm)
        drawing.label(one, "epoch", title)
        drawing.epochs_below(one)


def judge_dynamics(figure: str, rows: Sequence[Row], score: str) -> list[Claim]:
    """Convergence, and whether the fraction follows the loss."""
    group = {"": list(rows)}
    return [
        *judge_convergence(figure, group, score),
        judge_fraction(figure, group),
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


def judge_fraction(figure: str, groups: dict[str, list[Row]]) -> Claim:
    """Whether the fraction follows the training loss along the unfiltered runs."""
    return claim(
        figure,
        "fraction follows loss",
        "Along the unfiltered run, Spearman's ρ over epochs of fraction and training "
        f"loss is above {FOLLOWS}.",
        [_correlation(prefix, rows) for prefix, rows in groups.items()],
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
    finding = above(
        name, [rank_correlation(fraction[s], loss[s]) for s in loss], FOLLOWS
    )
    averaged = rank_correlation(
        stacked(fraction).mean(axis=0), stacked(loss).mean(axis=0)
    )
    extra = {f"{name}, averaged curves": averaged}
    words = f"{finding.words}, {averaged:.3g} for the averaged curves"
    return replace(finding, numbers=finding.numbers | extra, words=words)
