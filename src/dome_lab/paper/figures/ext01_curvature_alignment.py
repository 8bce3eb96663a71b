"""Overlap of the tracked basis with the leading curvature, through training on MNIST.

Beyond the paper, which asserts that the leading directions of the gradient covariance
are those of the Hessian and of its Gauss-Newton part. After epochs 1, 2, 4, ... the
leading C and C² eigenvectors of both matrices are computed over the same 500 training
samples, and it is measured how much of them lies in the tracked U, and in as many
leading eigenvectors of the covariance of those samples' gradients: what a tracker that
lags behind would lose.

Scale cpu: a network of linear layers instead of a ResNet-8, of which 128 samples' C²
Hessian eigenvectors had not converged after several minutes; 2,000 training images,
B = 32, 8 epochs, 3 seeds. A run took about 45 s of one core: 5 core-minutes in all.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.alignment import (
    COVARIANCE,
    GAUSS_NEWTON,
    HESSIAN,
    TRACKED,
    compute_alignment,
)
from dome_lab.paper.claims import Claim, Finding, above, claim, missing, paired
from dome_lab.paper.dynamics import dynamics_runs
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.statistics import (
    averages,
    curves,
    distinct,
    ends,
    number,
    select,
    stacked,
    student_band,
)

PAPER = Run(
    task="mnist",
    model="resnet8",
    seed=0,
    batch_size=128,
    epochs=16,
    lr=0.1,
    rank=100,
)
ALIGNED = 0.5  # half of an eigenspace
LAGS_BEHIND = 0.05
MATRICES = {HESSIAN: "Hessian", GAUSS_NEWTON: "Gauss-Newton matrix"}
BASES = {TRACKED: "tracked U", COVARIANCE: "covariance of the same samples"}


SCALES = {
    "paper": Repeated(run=PAPER),
    "cpu": Repeated(
        run=replace(
            PAPER,
            model="mlp",
            num_train=2000,
            num_test=2000,
            batch_size=32,
            epochs=8,
        ),
        num_seeds=3,
    ),
    "smoke": Repeated(
        run=replace(
            PAPER,
            task="digits",
            model="mlp",
            num_classes=3,
            num_train=64,
            num_test=50,
            batch_size=16,
            epochs=2,
            rank=9,
        ),
        num_seeds=2,
    ),
}
runs = dynamics_runs
compute_run = compute_alignment


def draw(rows: Sequence[Row]) -> Figure:
    """Overlap by step: a panel a matrix and arm."""
    figure, grid = drawing.canvas(2, 2, drawing.PAGE, 4.4)
    for panels, arm in zip(grid, (PLAIN, FILTERED), strict=True):
        for axes, (matrix, name) in zip(panels, MATRICES.items(), strict=True):
            _draw_panel(axes, select(rows, arm=arm, matrix=matrix))
            title = name if arm == PLAIN else ""
            drawing.label(axes, "step", "share in the basis", title)
        drawing.name_row(panels[0], drawing.ARM_NAMES[arm])
    drawing.add_title(figure, rows, grid[0][0])
    samples, k = (number(rows[0], column) for column in ("num_samples", "rank"))
    chance = f"{number(rows[0], 'chance'):.2g}"
    drawing.add_note(
        figure,
        f"Curvature over {samples:,.0f} training samples; bases of k = {k:.0f}; a "
        f"random basis has {chance}.",
        drawing.statistics_note(rows),
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Half of each eigenspace lies in U; and the tracker is not to blame for more."""
    aligned = [
        claim(
            "ext01",
            f"U holds the {name} of the {MATRICES[matrix]}",
            f"More than {ALIGNED:.0%} of the span of the leading {name} eigenvectors "
            f"of the {MATRICES[matrix]} lies in span(U), on average over the epochs "
            "looked at and after the last, with and without filtering.",
            [
                _above(rows, matrix, index, arm, ends_only=ends_only)
                for arm in (FILTERED, PLAIN)
                for ends_only in (False, True)
            ],
        )
        for matrix in MATRICES
        for index, name in enumerate(("C", "C²"))
    ]
    lagging = claim(
        "ext01",
        "the tracker does not lag behind",
        "After the last epoch the tracked U holds at most "
        f"{LAGS_BEHIND} less of the leading C eigenvectors of either matrix than as "
        "many leading eigenvectors of the covariance at the same weights.",
        [_lag(rows, matrix, arm) for matrix in MATRICES for arm in (FILTERED, PLAIN)],
    )
    return [*aligned, lagging]


def _above(
    rows: Sequence[Row], matrix: str, index: int, arm: str, *, ends_only: bool
) -> Finding:
    mine = _chosen(rows, matrix, index, arm, TRACKED)
    when = "after the last epoch" if ends_only else "on average"
    name = f"{drawing.ARM_NAMES[arm]}, {when}"
    found = (ends if ends_only else averages)(mine, "overlap")
    return above(name, list(found.values()), ALIGNED) if found else missing(name)


def _lag(rows: Sequence[Row], matrix: str, arm: str) -> Finding:
    return paired(
        f"{MATRICES[matrix]}, {drawing.ARM_NAMES[arm]}",
        ends(_chosen(rows, matrix, 0, arm, TRACKED), "overlap"),
        ends(_chosen(rows, matrix, 0, arm, COVARIANCE), "overlap"),
        low=-LAGS_BEHIND,
    )


def _chosen(
    rows: Sequence[Row], matrix: str, index: int, arm: str, basis: str
) -> list[Row]:
    """The rows of C (index 0) or C² (1) eigenvectors of a matrix, and one basis."""
    mine = select(rows, matrix=matrix, arm=arm, subspace=basis)
    numbers = distinct(mine, "num")
    return select(mine, num=int(numbers[index])) if numbers else []


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    for num, name, colour in zip(
        distinct(rows, "num"), ("C", "C²"), drawing.PALETTE, strict=False
    ):
        for basis, dash in zip(BASES, ("-", ":"), strict=True):
            mine = select(rows, num=int(num), subspace=basis)
            drawing.draw_line(
                axes,
                distinct(mine, "step"),
                student_band(stacked(curves(mine, "overlap"))),
                colour,
                linestyle=dash,
                marker="o",
                markersize=3,
                label=f"leading {name} = {num:.0f}, {BASES[basis]}",
            )
    drawing.log_below(axes, distinct(rows, "step"), {})
    axes.set_ylim(0, 1.02)
