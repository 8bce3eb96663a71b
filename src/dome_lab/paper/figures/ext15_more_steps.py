"""Whether the fraction follows the loss at B = 256 in as many steps as at B = 64.

Beyond fig10 and ext14: with a tenth of the learning rate the fraction follows the loss
at B = 64 and not at 256, where as many epochs are a quarter of the steps, and both
hardly change. Here unfiltered runs at B = 256 train four times as long. If steps are
what is missing, it follows.

Scale cpu: as ext14, 32 epochs, 5 seeds. About three minutes a run.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper import train
from dome_lab.paper.claims import Claim
from dome_lab.paper.figures import ext14_batch_step_length as ext14
from dome_lab.paper.figures import fig10_batch_size_dynamics as fig10
from dome_lab.paper.following import judge_groups
from dome_lab.paper.following_panels import draw_following
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Repeated, Run

LARGE, TIMES = 256, 4  # the batch size, and how many of B = 64 make one of it


def _longer(scale: str, epochs: int, batch_size: int = LARGE) -> Repeated:
    """ext14's unfiltered run at the larger batch size, for so many epochs."""
    config = ext14.SCALES[scale]
    run = replace(
        config.run, batch_size=batch_size, epochs=epochs * TIMES, removes="nothing"
    )
    return Repeated(run=run, num_seeds=config.num_seeds)


SCALES = {
    "paper": _longer("paper", 50),
    "cpu": _longer("cpu", 8),
    "smoke": _longer("smoke", 2, batch_size=48),
}


def runs(config: Repeated) -> list[Run]:
    """One unfiltered run a seed."""
    return [replace(config.run, seed=seed) for seed in range(config.num_seeds)]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss above, the fraction below it."""
    return draw_following(fig10.by_batch_size(rows), rows)


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Whether the fraction follows the loss."""
    return judge_groups("ext15", fig10.by_batch_size(rows))
