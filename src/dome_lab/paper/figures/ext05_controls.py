"""What else would help: controls for the filter on MNIST at rate 100, each tuned.

Beyond the paper, on fig03's question. Is it the tracked subspace, or would any do, or
only smaller samples? Random directions are taken out instead; samples are normalised,
or clipped; compressors with error feedback take the sketch's place; PowerSGD and the
sketch send as many bytes, with the filter and without; k is smaller, with one basis or
one per layer; directions are of low rank in every weight; half of the span is taken
out; the span is that of the gradients as Adam scales them. The learning rate of each is
chosen as in ext04.

Scale cpu: as ext00, B = 32, because there are so many; 5 judged seeds. A run takes a
quarter to a whole minute of one core, and each control has eleven or more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.drawing import draw_lines, end_values, name_of
from dome_lab.paper.figures import Found
from dome_lab.paper.figures import ext04_tuned as ext04
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, TEST, Run
from dome_lab.paper.statistics import ends, number, select
from dome_lab.paper.tolerance import EQUAL
from dome_lab.paper.tuning import Grid, first_trials, search

RATE = 100.0
POWER_RATE = 28.0  # the least that PowerSGD can send of a ResNet-8
DIRECTION_RANKS = (4, 1, 2, 8)
UNFILTERED = "no filter"
FEEDBACK = ("topk+feedback", "randomk+feedback")


def variants(
    run: Run,
    ranks: Sequence[int] = (10, 5, 20, 50),
    thin_ranks: Sequence[int] = (10, 5, 20),
    direction_ranks: Sequence[int] = DIRECTION_RANKS,
    power_rate: float = POWER_RATE,
) -> tuple[Run, ...]:
    """No filter, the filter, and every control, from the most to the least telling.

    Args:
        run: The filtered run.
        ranks: Smaller ranks.
        thin_ranks: Those of them that are tried with directions of low rank.
        direction_ranks: The ranks of those.
        power_rate: The rate of PowerSGD, and of what is compared with it.
    """
    plain = replace(run, rank=None)
    sketch = replace(plain, rate=power_rate)
    powers = replace(sketch, compressor="powersgd+feedback")
    return (
        plain,
        run,
        replace(run, removes="random"),
        replace(plain, sample_norms="normalised"),
        replace(plain, sample_norms="clipped"),
        *(replace(run, rank=rank) for rank in ranks),
        *(
            replace(run, rank=rank, direction_rank=thin)
            for rank in thin_ranks
            for thin in direction_ranks
        ),
        *(replace(run, rank=rank, layout="layerwise") for rank in ranks),
        *(replace(plain, compressor=name) for name in FEEDBACK),
        replace(run, strength=0.5),
        replace(run, removes="preconditioned"),
        sketch,
        replace(run, rate=power_rate),
        powers,
        replace(powers, rank=run.rank),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: what is compared (``variants``), learning rates, number of seeds."""

    compared: tuple[Run, ...] = variants(ext04.ALL_CASES[0])
    grid: Grid = ext04.ADAM
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(compared=variants(replace(fig03.SMALL, rate=RATE))),
    "smoke": Config(
        compared=variants(
            replace(fig03.SCALES["smoke"].run, num_train=32, rate=100),
            ranks=(2,),
            thin_ranks=(2,),
            direction_ranks=(1,),
        ),
        grid=Grid(rates=(1e-3,), seeds=(100,), most_beyond=0),
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """The first trials of every control."""
    return [
        trial for run in config.compared for trial in first_trials(run, config.grid)
    ]


def later_runs(config: Config, found: Found) -> list[Run]:
    """Further trials, and what is judged where they are over."""
    wanted: list[Run] = []
    for run in config.compared:
        best = search(run, config.grid, found, run.epochs)
        if isinstance(best, list):
            wanted += best
        else:
            wanted += [
                replace(run, lr=best, seed=seed, split=TEST)
                for seed in range(config.num_seeds)
            ]
    return wanted


def parts(config: Config) -> list[Config]:
    """Every control with what it is compared with: none and the filter, at its rate.

    Directions of low rank are compared with as many exact ones too.
    """
    found = []
    for rate in dict.fromkeys(run.rate for run in config.compared):
        plain, dome, *others = [run for run in config.compared if run.rate == rate]
        for run in others:
            compared = dict.fromkeys([plain, dome, replace(run, direction_rank=None)])
            found.append(replace(config, compared=tuple(compared | {run: None})))
    return found


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end of every control."""
    found = _judged(rows)
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.PAGE, 0.9 + 0.19 * len(found))
    height = np.arange(len(found), 0.0, -1)
    arms = [FILTERED if "DOME" in name else PLAIN for name in found]
    colours = [drawing.COLOURS[arm] for arm in arms]
    draw_lines(axes, [end_values(mine) for mine in found.values()], height, colours)
    names = [f"{name} ({mine[0]['lr']:g})" for name, mine in found.items()]
    axes.set_yticks(height, names)
    drawing.label(axes, "test accuracy (in brackets: the learning rate chosen)", "")
    judged = select(rows, split=TEST)
    drawing.add_title(figure, judged)
    drawing.add_note(
        figure,
        drawing.statistics_note(judged, "bars"),
        drawing.extension_note(judged, varied=["lr", "rank"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Each control against the filter and against none, at as many bytes."""
    found = _judged(rows)
    claims = []
    for rate in dict.fromkeys(mine[0]["rate"] for mine in found.values()):
        here = {name: mine for name, mine in found.items() if mine[0]["rate"] == rate}
        accuracy = {name: ends(mine, "test_accuracy") for name, mine in here.items()}
        # The sketch alone and the paper's filter come first, see ``variants``.
        plain, dome, *others = here
        claims.append(_ahead(dome, plain, accuracy))
        for name in others:
            claims.append(_ahead(name, plain, accuracy))
            claims.append(_as_good(name, dome, accuracy))
            exact = _name(here[name][0] | {"direction_rank": None})
            if exact != name:
                claims.append(_as_good(name, exact, accuracy))
    return claims


def _ahead(name: str, plain: str, accuracy: dict[str, dict[int, float]]) -> Claim:
    return claim(
        "ext05",
        f"{name}: ahead of {plain}",
        f"After as many bytes, test accuracy is above that of “{plain}”.",
        [paired("gain", accuracy[name], accuracy[plain], low=0)],
    )


def _as_good(name: str, dome: str, accuracy: dict[str, dict[int, float]]) -> Claim:
    return claim(
        "ext05",
        f"{name}: as good as {dome}",
        f"Test accuracy is at most {EQUAL} below that of “{dome}”.",
        [paired("change", accuracy[name], accuracy[dome], low=-EQUAL)],
    )


def _judged(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The judged rows of each control by its name, in the order of ``variants``."""
    found: dict[str, list[Row]] = {}
    for row in select(rows, split=TEST):
        found.setdefault(_name(row), []).append(row)
    return dict(sorted(found.items(), key=lambda item: _place(item[1][0])))


def _place(row: Row) -> tuple[bool, bool, bool, float, bool, float]:
    """Of each rate: the sketch alone, the paper's filter, then all others."""
    is_sketch = row["compressor"] == "gaussian" and row["sample_norms"] is None
    is_plain = is_sketch and row["rank"] is None
    is_dome = is_sketch and _what_is_removed(row) == "DOME"
    rank = math.inf if row["rank"] is None else -number(row, "rank")
    thin = number(row, "direction_rank") if row["direction_rank"] else math.inf
    return row["rate"] != RATE, not is_plain, not is_dome, rank, not is_sketch, -thin


def _name(row: Row) -> str:
    """What is done in place of the filter."""
    parts = []
    if row["sample_norms"] is not None:
        parts.append(f"samples {row['sample_norms']}")
    if row["compressor"] != "gaussian":
        parts.append(name_of(row["compressor"]))
    if row["rank"] is not None:
        parts.append(f"{_what_is_removed(row)}, k = {row['rank']}")
    parts = parts or [UNFILTERED]
    if row["rate"] != RATE:
        parts.append(f"rate {row['rate']:g}")
    return ", ".join(parts)


def _what_is_removed(row: Row) -> str:
    if row["removes"] in _OTHER_SPANS:
        return _OTHER_SPANS[str(row["removes"])]
    if row["strength"] != 1:
        return f"DOME, strength {row['strength']:g}"
    if row["direction_rank"] is not None:
        return f"DOME, directions of rank {row['direction_rank']}"
    return "DOME" if row["layout"] == "global" else "DOME, one basis per layer"


_OTHER_SPANS = {"random": "random directions", "preconditioned": "as Adam scales them"}
