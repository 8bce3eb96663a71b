"""Test accuracy on MNIST by the number k of directions removed, at rate 1,000.

Claims: a gain already at k <= 10; accuracy grows up to k = C², where it is about best;
far beyond it falls.

Scale cpu: as fig03, fewer ranks, up to 1,000.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, Finding, claim, missing, paired
from dome_lab.paper.drawing import draw_points, end_values, point_band
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.statistics import distinct, ends, select
from dome_lab.paper.tolerance import EQUAL

NUM_CLASSES = 10
SQUARE = NUM_CLASSES**2
FEW, FAR = 10, 5 * SQUARE  # small ranks, and ranks far beyond C²
PAPER = replace(fig03.PAPER, rate=1000)
RANKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: a run of it, the ranks, and how many seeds."""

    run: Run = PAPER
    ranks: tuple[int, ...] = RANKS
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(fig03.SCALES["cpu"].run, rate=1000),
        ranks=(1, 5, 10, 50, 100, 200, 500, 1000),
        num_seeds=8,
    ),
    "smoke": Config(
        run=replace(fig03.SCALES["smoke"].run, rate=1000),
        ranks=(1, 10, 100),
        num_seeds=2,
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Every rank and the unfiltered arm, seed by seed, the dearest first."""
    return [
        replace(config.run, seed=seed, rank=rank)
        for seed in range(config.num_seeds)
        for rank in (*reversed(config.ranks), None)
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rank, the unfiltered arm as a level line."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 3.1)
    ranks = distinct(rows, "rank")
    plain = end_values(select(rows, arm=PLAIN))
    drawing.draw_band(axes, ranks, point_band([plain] * len(ranks)), PLAIN)
    draw_points(
        axes,
        ranks,
        [end_values(select(rows, rank=rank)) for rank in ranks],
        drawing.COLOURS[FILTERED],
        label=drawing.ARM_NAMES[FILTERED],
        marker=drawing.MARKERS[FILTERED],
    )
    drawing.log_below(axes, ranks, {})
    axes.tick_params(axis="x", labelrotation=45)
    drawing.mark(axes, NUM_CLASSES, "C")
    drawing.mark(axes, SQUARE, "C²")
    drawing.label(axes, "rank k", "test accuracy at rate 1,000")
    drawing.add_title(figure, rows, axes)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars and shaded"),
        drawing.scale_note(rows, PAPER, varied=["rank"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Few directions, C² of them, and far more."""
    by_rank = {k: _accuracy(rows, k) for k in distinct(rows, "rank")}
    small = {k: accuracy for k, accuracy in by_rank.items() if k <= FEW}
    plain = ends(select(rows, arm=PLAIN), "test_accuracy")
    others = {k: _mean(accuracy) for k, accuracy in by_rank.items() if k != SQUARE}
    best = max(others, key=lambda k: others[k], default=SQUARE)
    return [
        claim(
            "fig04",
            "gain at small ranks",
            f"The gain in test accuracy, mean over the ranks up to {FEW}, is above 0.",
            [paired("mean gain", _averaged(small.values()), plain, low=0)],
            _listed(small),
        ),
        claim(
            "fig04",
            "improves up to C²",
            f"Test accuracy at k = C² = {SQUARE} is above that at k = C.",
            [_change(by_rank, NUM_CLASSES, SQUARE, low=0)],
        ),
        claim(
            "fig04",
            "best near C²",
            f"At k = C² = {SQUARE} there is a gain in test accuracy, and it is less "
            f"than {EQUAL} below the best other rank.",
            [
                paired("gain at C²", by_rank.get(SQUARE, {}), plain, low=0),
                _change(by_rank, best, SQUARE, low=-EQUAL),
            ],
            f"The best other rank is {best:g}.",
        ),
        claim(
            "fig04",
            "worse far beyond C²",
            f"Test accuracy at the largest rank, {FAR} or more, is below that at C².",
            [_change(by_rank, SQUARE, max(FAR, *by_rank), high=0)],
            _listed(by_rank),
        ),
    ]


def _accuracy(rows: Sequence[Row], rank: float) -> dict[int, float]:
    return ends(select(rows, rank=rank), "test_accuracy")


def _change(
    by_rank: Mapping[float, dict[int, float]],
    start: float,
    stop: float,
    low: float = -math.inf,
    high: float = math.inf,
) -> Finding:
    """How accuracy changes from one rank to another, if both were computed."""
    name = f"change from k = {start:g} to k = {stop:g}"
    if not by_rank.keys() >= {start, stop}:
        return missing(name)
    return paired(name, by_rank[stop], by_rank[start], low, high)


def _averaged(runs: Iterable[dict[int, float]]) -> dict[int, float]:
    """Mean over the ranks, seed by seed, of the seeds that have all of them."""
    together = list(runs)
    seeds = set.intersection(*(set(run) for run in together)) if together else set()
    return {s: sum(run[s] for run in together) / len(together) for s in seeds}


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / len(values)


def _listed(by_rank: Mapping[float, dict[int, float]]) -> str:
    parts = [f"{_mean(values):.3f} at k = {k:g}" for k, values in by_rank.items()]
    return f"Mean accuracy: {', '.join(parts)}."
