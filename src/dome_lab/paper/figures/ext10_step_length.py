"""Whether the fraction follows the loss with torch's momentum and shorter steps.

Beyond fig01 and fig02, where the fraction follows the training loss with the paper's
averaging momentum and not with torch's. The two differ in the length of steps, ten to
one, and in how the first steps are corrected. Here momentum is torch's, and the
learning rate a tenth of theirs: steps are as long as with the paper's, and the first
ones are not corrected. The runs at the whole learning rate are fig01's and fig02's.

Scale cpu: as fig01 and fig02, unfiltered runs only, 8 seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import train
from dome_lab.paper.claims import Claim
from dome_lab.paper.figures import fig01_cifar10_dynamics as fig01
from dome_lab.paper.figures import fig02_tinyimagenet_dynamics as fig02
from dome_lab.paper.following import judge_groups
from dome_lab.paper.following_panels import draw_following
from dome_lab.paper.names import subset_name
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.series import distinct, select

SHORTER = 10  # 1 / (1 − β), the steps of torch's momentum in those of the paper's


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run of each data set, and how many seeds."""

    cases: tuple[Run, ...] = (fig01.PAPER, fig02.PAPER)
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        cases=(fig01.SCALES["cpu"].run, fig02.SCALES["cpu"].run), num_seeds=8
    ),
    "smoke": Config(
        cases=(replace(fig01.SCALES["smoke"].run, num_train=32, epochs=5),),
        num_seeds=2,
    ),
}
MAX_JOBS = fig02.MAX_JOBS


def runs(config: Config) -> list[Run]:
    """Every data set at its learning rate and at a tenth of it, seed by seed."""
    return [
        replace(case, seed=seed, lr=case.lr / times, removes="nothing")
        for case in config.cases
        for seed in range(config.num_seeds)
        for times in (1, SHORTER)
    ]


def parts(config: Config) -> list[Config]:
    """Every data set for itself."""
    return [replace(config, cases=(case,)) for case in config.cases]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss above, the fraction below it, a column a learning rate."""
    return draw_following(_groups(rows), rows, varied=["lr", "num_classes"])


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Whether the fraction follows the loss, at each learning rate."""
    return judge_groups(
        "ext10", _groups(rows), "the unfiltered run with torch's momentum"
    )


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each data set and learning rate by its name, the larger first."""
    kinds = dict.fromkeys((row["task"], row["num_classes"]) for row in rows)
    found = {}
    for task, num_classes in kinds:
        mine = select(rows, task=task, num_classes=num_classes)
        for lr in sorted(distinct(mine, "lr"), reverse=True):
            name = f"{subset_name(task, num_classes)}, learning rate {lr:g}"
            found[name] = select(mine, lr=lr)
    return found
