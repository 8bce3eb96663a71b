"""How much of the gradient's norm is kept with k = C and with k = C² directions.

Beyond the paper, which says that most of the norm is removed, and takes k = C² on
CIFAR-10 but k = C on Tiny ImageNet and on DBPedia, where C² does not fit its memory.
There fig02 and fig06 find that most is kept. Is it k? With fewer classes C² fits.

Scale cpu: Tiny ImageNet as in fig02, 20 classes, so that k = C is fig02's; DBPedia as
in fig06 but 1,600 texts of 10 classes, 1,000 to test; filtered runs only, 3 seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, below, claim, paired
from dome_lab.paper.dynamics import MOST
from dome_lab.paper.figures import fig02_tinyimagenet_dynamics as fig02
from dome_lab.paper.figures import fig06_dbpedia_dynamics as fig06
from dome_lab.paper.names import subset_name
from dome_lab.paper.points import draw_points
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import averages, distinct, select


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run for each data set, with its number of classes, and the seeds."""

    cases: tuple[Run, ...] = (
        replace(fig02.PAPER, num_classes=20),
        replace(fig06.PAPER, num_classes=10),
    )
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        cases=(
            fig02.SCALES["cpu"].run,
            replace(
                fig06.SCALES["cpu"].run, num_classes=10, num_train=1600, num_test=1000
            ),
        ),
        num_seeds=3,
    ),
    "smoke": Config(
        cases=(
            replace(fig02.SCALES["smoke"].run, num_classes=4),
            replace(fig06.SCALES["smoke"].run, num_classes=3, num_test=30),
        ),
        num_seeds=2,
    ),
}


def runs(config: Config) -> list[Run]:
    """Each data set with k = C and with k = C²."""
    return [
        replace(case, rank=case.num_classes**power, seed=seed)
        for case in config.cases
        if case.num_classes is not None
        for power in (1, 2)
        for seed in range(config.num_seeds)
    ]


def parts(config: Config) -> list[Config]:
    """Every data set for itself."""
    return [replace(config, cases=(case,)) for case in config.cases]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """What is kept by k, a line a data set."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 3.1)
    found = _by_task(rows)
    for (name, mine), colour in zip(found.items(), drawing.PALETTE, strict=False):
        ranks = distinct(mine, "rank")
        values = [list(_kept(mine, rank).values()) for rank in ranks]
        draw_points(axes, ranks, values, colour, label=name, marker="o")
    axes.axhline(MOST, color=drawing.GREY, linewidth=0.9, linestyle=":")
    axes.set_ylim(0, 1)
    drawing.log_below(axes, distinct(rows, "rank"), {})
    drawing.label(axes, "directions k: C, and C²", "kept of the norm")
    drawing.add_title(figure, rows, axes, side_by_side=1)
    varied = ("rank", "num_classes", "num_train", "num_test", "batch_size")
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        drawing.extension_note(rows, varied),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Whether most is removed with k = C², and more than with k = C."""
    claims = []
    for name, mine in _by_task(rows).items():
        few, many = (_kept(mine, rank) for rank in distinct(mine, "rank"))
        claims += [
            claim(
                "ext09",
                f"{name}: more is removed with k = C²",
                "Less of the batch gradient's norm is kept than with k = C, mean over "
                "epochs.",
                [paired("change of what is kept", many, few, high=0)],
            ),
            claim(
                "ext09",
                f"{name}: most of the norm is removed with k = C²",
                f"Less than {MOST} of the batch gradient's norm is kept, mean over "
                f"epochs.",
                [below("kept of the norm", list(many.values()), MOST)],
            ),
        ]
    return claims


def _by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    kinds = dict.fromkeys((row["task"], row["num_classes"]) for row in rows)
    return {
        subset_name(task, num): select(rows, task=task, num_classes=num)
        for task, num in kinds
    }


def _kept(rows: Sequence[Row], rank: float) -> dict[int, float]:
    return averages(select(rows, rank=rank), "kept_norm")
