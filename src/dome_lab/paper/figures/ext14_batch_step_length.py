"""Whether fig10's claims on the fraction hold with shorter steps.

Beyond fig10, where at B = 256 the fraction neither follows the loss nor is higher in
filtered runs: the loss of most of these rises for some epochs there, as it does where
steps are too long. Here the learning rate is a tenth of fig10's. If long steps are the
reason, both claims hold.

Scale cpu: as fig10, B = 64 and 256, 5 seeds. About a minute and a half a run.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim
from dome_lab.paper.dynamics import judge_course
from dome_lab.paper.figures import fig09_batch_size_accuracy as fig09
from dome_lab.paper.figures import fig10_batch_size_dynamics as fig10
from dome_lab.paper.figures.ext10_step_length import SHORTER
from dome_lab.paper.figures.fig09_batch_size_accuracy import Config
from dome_lab.paper.rows import Row


def _shorter(config: Config, num_seeds: int, *batch_sizes: int) -> Config:
    """Settings at a tenth of their learning rate, of some batch sizes if given."""
    run = replace(config.run, lr=config.run.lr / SHORTER)
    epochs = tuple(
        pair for pair in config.epochs if not batch_sizes or pair[0] in batch_sizes
    )
    return replace(config, run=run, epochs=epochs, num_seeds=num_seeds)


SCALES = {
    "paper": _shorter(fig10.SCALES["paper"], 5),
    "cpu": _shorter(fig10.SCALES["cpu"], 5, 64, 256),
    "smoke": _shorter(fig10.SCALES["smoke"], 2),
}
runs = fig09.runs
compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss, fraction and accuracy by epoch, a row a batch size."""
    return fig10.draw_batches(
        rows, drawing.extension_note(rows, varied=["batch_size", "epochs"])
    )


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Whether the fraction follows the loss and is higher in filtered runs."""
    groups = {f"{name}: ": mine for name, mine in fig10.by_batch_size(rows).items()}
    return judge_course("ext14", groups)
