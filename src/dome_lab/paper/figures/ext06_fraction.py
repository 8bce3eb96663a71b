"""Does the fraction follow the loss? Unfiltered runs of fifty epochs, three ways.

Beyond fig01 and fig02, whose claim it is (ρ = 0.98 and 0.96): as long as the paper's
runs, with momentum as torch sums it and as the paper's Algorithm 1 averages it, whose
steps are a tenth as long; and, as a control, with a tracker that forgets, which cannot
lag behind. ρ is judged over the whole run, from where the tracker has settled, and of
the changes from epoch to epoch.

Scale cpu: CIFAR-10 with 2,500 images and Tiny ImageNet with 20 classes as in fig01 and
fig02, 50 epochs, 3 seeds: about two hours of one core. The control is CIFAR-10's alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim
from dome_lab.paper.drawing import name_of, subset_name
from dome_lab.paper.dynamics import CHANGES, FOLLOWS, LATE, WHOLE, follows
from dome_lab.paper.figures import fig01_cifar10_dynamics as fig01
from dome_lab.paper.figures import fig02_tinyimagenet_dynamics as fig02
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN, Run
from dome_lab.paper.statistics import curves, select, stacked, student_band

FORGET = 0.05
EPOCHS = 50


def ways(*cases: Run) -> tuple[Run, ...]:
    """Every data set three ways, with a tracker that only watches.

    Args:
        cases: Runs with torch's momentum, one a data set.
    """
    return tuple(
        replace(case, removes="nothing", **change)
        for case in cases
        for change in ({"optimizer": "ema"}, {}, {"forget": FORGET})
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: one run a data set and way, and how many seeds."""

    cases: tuple[Run, ...] = ways(fig01.PAPER, fig02.PAPER)
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        cases=(
            *ways(replace(fig01.SCALES["cpu"].run, epochs=EPOCHS)),
            *ways(replace(fig02.SCALES["cpu"].run, epochs=EPOCHS))[:2],
        ),
        num_seeds=3,
    ),
    "smoke": Config(
        cases=ways(replace(fig01.SCALES["smoke"].run, num_train=32, epochs=5)),
        num_seeds=2,
    ),
}
MAX_JOBS = fig02.MAX_JOBS


def runs(config: Config) -> list[Run]:
    """Every case with every seed."""
    return [
        replace(case, seed=seed)
        for case in config.cases
        for seed in range(config.num_seeds)
    ]


def parts(config: Config) -> list[Config]:
    """Every data set and way for itself."""
    return [replace(config, cases=(case,)) for case in config.cases]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss above, the fraction below it, a column a way."""
    groups = _groups(rows)
    num = len(groups)
    figure, lines = drawing.canvas(2, num, max(drawing.COLUMN, 1.75 * num), 3.6)
    panels = {"train_loss": "training loss", "fraction": "fraction"}
    for line, (column, title) in zip(lines, panels.items(), strict=True):
        for axes, (name, mine) in zip(line, groups.items(), strict=True):
            values = stacked(curves(mine, column))
            epochs = np.arange(1, values.shape[1] + 1)
            axes.plot(epochs, values.T, color=drawing.COLOURS[PLAIN], **drawing.SEED)
            seen = axes.get_ylim()
            drawing.draw_band(axes, epochs, student_band(values), PLAIN)
            axes.set_ylim(seen)
            above = name.replace(", ", "\n") if line is lines[0] else ""
            drawing.label(axes, "epoch", title if axes is line[0] else "", above)
            drawing.epochs_below(axes)
    drawing.add_note(
        figure, drawing.statistics_note(rows), drawing.extension_note(rows)
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Over the whole run, from the settled tracker on, and of changes, each way."""
    said = {
        WHOLE: "over epochs",
        LATE: f"over epochs {LATE}",
        CHANGES: "over epochs of the changes since the epoch before",
    }
    return [
        claim(
            "ext06",
            f"{name}: {part}",
            f"Along the unfiltered run, Spearman's ρ {words} of fraction and training "
            f"loss is above {FOLLOWS}.",
            [follows("", mine, part)],
        )
        for name, mine in _groups(rows).items()
        for part, words in said.items()
    ]


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each way by its name."""
    columns = ("task", "num_classes", "optimizer", "forget")
    kinds = dict.fromkeys(tuple(row[c] for c in columns) for row in rows)
    found = {}
    for kind in kinds:
        task, num_classes, optimizer, forget = kind
        name = f"{subset_name(task, num_classes)}, {name_of(optimizer)}"
        name += "" if forget is None else f", forget {forget:g}"
        found[name] = select(rows, **dict(zip(columns, kind, strict=True)))
    return found
