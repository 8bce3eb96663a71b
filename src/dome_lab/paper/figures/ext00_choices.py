"""What to choose: variants of the filter on MNIST at rates 100 and 1,000.

Beyond the paper, on fig03's question. Other ways to follow the subspace:
IncrementalSVD, forgetting, fewer updates, one basis a layer, oversampling. And whether
what is removed is noise or signal: the removed part alone goes on, or is sent exactly,
as k numbers beside the sketch of the rest.

Scale cpu: 2,500 training and 2,000 test images, B = 32, 6 epochs (468 steps), 3 seeds.
Measured: 51 minutes for all runs one after the other, on a machine that did other work
too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import draw_lines, end_values
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.statistics import distinct, ends, select
from dome_lab.paper.tolerance import EQUAL

UNFILTERED, PAPERS = "no filter", "the paper's filter"
ALONE, EXACT = "removed part alone", "removed part exactly"
# What a variant is called, by the column in which it differs from the paper's.
_NAMED = {
    "tracker": {"svd": "IncrementalSVD"},
    "layout": {"layerwise": "layer-wise bases"},
    "removes": {"rest": ALONE, "uncoded": EXACT},
    "forget": {},
    "update_every": {},
    "oversample": {},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: fig03's run, the rates, directions a layer, and number of seeds."""

    run: Run = fig03.PAPER
    rates: tuple[float, ...] = (100, 1000)
    layer_rank: int = 10
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(run=fig03.SMALL, num_seeds=3),
    "smoke": Config(run=fig03.SCALES["smoke"].run, layer_rank=2, num_seeds=2),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Every variant at every rate and seed; the first two are fig03's."""
    run = config.run
    variants = [
        replace(run, rank=None),
        run,
        replace(run, tracker="svd"),
        replace(run, forget=0.05),
        replace(run, update_every=5),
        replace(run, update_every=20),
        replace(run, layout="layerwise", rank=config.layer_rank),
        replace(run, oversample=run.rank or 0),
        replace(run, removes="rest"),
        replace(run, removes="uncoded"),
    ]
    return [
        replace(variant, rate=rate, seed=seed)
        for variant in variants
        for rate in config.rates
        for seed in range(config.num_seeds)
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end of every variant, a panel a rate."""
    rates, variants = distinct(rows, "rate"), _variants(rows)
    figure, (panels,) = drawing.canvas(1, len(rates), drawing.PAGE, 3.2)
    height = np.arange(len(variants), 0.0, -1)
    for axes, rate in zip(panels, rates, strict=True):
        values = [end_values(select(v, rate=rate)) for v in variants.values()]
        arms = [PLAIN if name == UNFILTERED else FILTERED for name in variants]
        draw_lines(axes, values, height, [drawing.COLOURS[arm] for arm in arms])
        shown = list(variants) if axes is panels[0] else [""] * len(variants)
        axes.set_yticks(height, shown)
        drawing.label(axes, "test accuracy", "", f"rate {rate:,g}")
    drawing.add_title(figure, rows)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        drawing.extension_note(rows, varied=["rank"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Each variant against the paper's, and what the removed part is worth."""
    ways = [v for v in _variants(rows) if v not in (UNFILTERED, PAPERS, ALONE, EXACT)]
    alternatives = [
        _compared(
            rows,
            f"{way}: as good as the paper's",
            f"Test accuracy is at most {EQUAL} below that of the paper's filter.",
            (way, PAPERS),
            low=-EQUAL,
        )
        for way in ways
    ]
    return [
        *alternatives,
        _compared(
            rows,
            "what is removed trains worse than what is kept",
            "Test accuracy with the removed part alone is below that with the rest.",
            (ALONE, PAPERS),
            high=0,
        ),
        _compared(
            rows,
            "what is removed is noise",
            "Sending the removed part exactly, beside the sketch of the rest, adds "
            f"less than {EQUAL} to test accuracy.",
            (EXACT, PAPERS),
            high=EQUAL,
        ),
    ]


def _compared(
    rows: Sequence[Row],
    name: str,
    statement: str,
    pair: tuple[str, str],
    low: float = -math.inf,
    high: float = math.inf,
) -> Claim:
    """A claim on the first variant against the second, at every rate."""
    after, before = (_variants(rows).get(variant, []) for variant in pair)
    findings = [
        paired(
            f"change at rate {rate:,g}",
            ends(select(after, rate=rate), "test_accuracy"),
            ends(select(before, rate=rate), "test_accuracy"),
            low,
            high,
        )
        for rate in distinct(rows, "rate")
    ]
    return claim("ext00", name, statement, findings)


def _variants(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each variant by its name, in the order in which they come."""
    found: dict[str, list[Row]] = {UNFILTERED: [], PAPERS: []}
    for row in rows:
        found.setdefault(_name(row), []).append(row)
    return {name: mine for name, mine in found.items() if mine}


def _name(row: Row) -> str:
    if row["rank"] is None:
        return UNFILTERED
    names = [
        known.get(str(row[column]), f"{column} {row[column]}")
        for column, known in _NAMED.items()
        if row[column] != getattr(fig03.PAPER, column)
    ]
    return ", ".join(names) or PAPERS
