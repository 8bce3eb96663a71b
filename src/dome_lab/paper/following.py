"""Whether the fraction follows the training loss along a run, by Spearman's ρ.

Over a whole run two curves that both fall have a large ρ whatever binds them. So it is
told of two parts as well: from where the tracker has settled on, and of the changes
from one epoch to the next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dome_lab.paper.claims import Finding, correlated, missing
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN
from dome_lab.paper.series import curves, number, select, stacked
from dome_lab.paper.statistics import Array, rank_correlation

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
