"""How much of the subspace is left n steps later, at several learning rates, on MNIST.

Beyond the paper, which relies on an eigenspace that evolves slowly. From steps 20 and
200 on, the basis is compared with what it was, n steps later. A tracker that averages
all batches moves slowly whatever happens, so the leading eigenvectors of the gradient
covariance of 300 training samples, always the same, are compared in the same way: they
move because the weights do, and for no other reason.

Scale cpu: a network of linear layers as in ext01, 2,000 training images, B = 32, 8
epochs, 4 learning rates, 3 seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, Finding, above, claim, missing, paired
from dome_lab.paper.drift import compute_drift
from dome_lab.paper.figures import ext01_curvature_alignment as ext01
from dome_lab.paper.looking import COVARIANCE, TRACKED
from dome_lab.paper.points import point_band
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import distinct, ends, number, select

PAPER = ext01.PAPER
SHORT, LONG = 10, 100  # steps
SLOW, HALF = 0.9, 0.5  # overlap that is left
BASES = {TRACKED: "tracked U", COVARIANCE: "covariance of the same samples"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: a run of it, learning rates, and how many seeds."""

    run: Run = PAPER
    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(run=ext01.SCALES["cpu"].run, num_seeds=3),
    "smoke": Config(
        run=replace(ext01.SCALES["smoke"].run, num_train=128, batch_size=8, epochs=2),
        learning_rates=(0.03, 0.3),
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """A filtered run for every learning rate and seed."""
    return [
        replace(config.run, lr=lr, seed=seed)
        for lr in config.learning_rates
        for seed in range(config.num_seeds)
    ]


compute_run = compute_drift


def draw(rows: Sequence[Row]) -> Figure:
    """Overlap by number of steps waited: a panel a basis and beginning."""
    anchors = distinct(rows, "anchor")
    figure, grid = drawing.canvas(len(anchors), 2, drawing.PAGE, 0.4 + 2 * len(anchors))
    for panels, anchor in zip(grid, anchors, strict=True):
        for axes, (basis, name) in zip(panels, BASES.items(), strict=True):
            _draw_panel(axes, select(rows, anchor=int(anchor), subspace=basis))
            title = name if anchor == anchors[0] else ""
            drawing.label(axes, "steps waited", "overlap left", title)
        drawing.name_row(panels[0], f"from step {anchor:.0f} on")
    drawing.add_title(figure, rows, grid[0][0])
    k, samples = (number(rows[0], column) for column in ("rank", "num_samples"))
    drawing.add_note(
        figure,
        f"Mean squared cosine of the principal angles between bases of k = {k:.0f}; "
        f"covariance of at most {samples:,.0f} training samples.",
        drawing.statistics_note(rows),
        drawing.extension_note(rows, varied=["lr"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Slow over ten steps, still there after a hundred, faster at larger rates."""
    rates = distinct(rows, "lr")
    late = int(max(distinct(rows, "anchor"), default=0))
    slow = [
        claim(
            "ext02",
            f"{BASES[basis]}: {words} after {lag} steps",
            f"From step {late} on, the overlap {lag} steps later is above {bound} at "
            "every learning rate.",
            [_left(rows, basis, late, lag, lr, bound) for lr in rates],
        )
        for basis in BASES
        for lag, bound, words in ((SHORT, SLOW, "hardly moved"), (LONG, HALF, "there"))
    ]
    faster = [
        claim(
            "ext02",
            f"{BASES[basis]}: moves faster at larger learning rates",
            f"From step {late} on, the overlap {LONG} steps later is smaller at the "
            "largest learning rate than at the smallest.",
            [
                paired(
                    f"change from rate {rates[0]:g} to {rates[-1]:g}",
                    _ends(rows, basis, late, LONG, rates[-1]),
                    _ends(rows, basis, late, LONG, rates[0]),
                    high=0,
                )
            ],
        )
        for basis in BASES
    ]
    return [*slow, *faster]


def _left(
    rows: Sequence[Row], basis: str, anchor: int, lag: int, lr: float, bound: float
) -> Finding:
    name = f"overlap at rate {lr:g}"
    found = _ends(rows, basis, anchor, lag, lr)
    return above(name, list(found.values()), bound) if found else missing(name)


def _ends(
    rows: Sequence[Row], basis: str, anchor: int, lag: int, lr: float
) -> dict[int, float]:
    mine = select(rows, subspace=basis, anchor=anchor, lag=lag, lr=lr)
    return ends(mine, "overlap")


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    lags = distinct(rows, "lag")
    for lr, colour, marker in zip(
        distinct(rows, "lr"), drawing.PALETTE, "os^D", strict=False
    ):
        mine = select(rows, lr=lr)
        values = [
            list(ends(select(mine, lag=int(n)), "overlap").values()) for n in lags
        ]
        drawing.draw_line(
            axes,
            lags,
            point_band(values),
            colour,
            marker=marker,
            markersize=3,
            label=f"learning rate {lr:g}",
        )
    drawing.log_below(axes, lags, {})
    axes.set_ylim(0, 1.02)
