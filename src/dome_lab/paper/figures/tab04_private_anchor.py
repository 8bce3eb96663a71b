"""DP-SGD by ``dome.privacy`` on all of MNIST, against what the literature reports.

Not in the paper: an anchor, so that nobody need doubt the implementation before looking
at what a filter adds (tab02). The network of Papernot et al. (2021), no filter, ε = 3
at δ = 1e-5; batches of 512, learning rate 0.5, momentum 0.9, clipping norm 0.1 and 40
epochs are those that Tramèr and Boneh (2021, arXiv:2011.11660) found best for it. They
report 98.1 %.

Scale cpu: all 60,000 training images, none of them public, and all 10,000 test images,
3 seeds: a quarter of an hour of one core for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, above, always, claim
from dome_lab.paper.private import compute_private
from dome_lab.paper.rows import Row
from dome_lab.paper.run import PLAIN, Run
from dome_lab.paper.statistics import curves, ends, number, stacked, student_band

LITERATURE = 0.981
ENOUGH = 0.975
PAPER = Run(
    task="mnist",
    model="tanh_cnn",
    seed=0,
    batch_size=512,
    epochs=40,
    lr=0.5,
    momentum=0.9,
    epsilon=3.0,
    max_grad_norm=0.1,
    public_every=0,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run, and how many seeds."""

    run: Run = PAPER
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(num_seeds=3),
    "smoke": Config(
        run=replace(
            PAPER, task="digits", num_train=100, num_test=50, epochs=2, batch_size=30
        ),
        num_seeds=2,
    ),
}
compute_run = compute_private


def runs(config: Config) -> list[Run]:
    """The run with every seed."""
    return [replace(config.run, seed=seed) for seed in range(config.num_seeds)]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy by epoch, and what the literature has at the end."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 2.7)
    values = stacked(curves(rows, "test_accuracy"))
    epochs = np.arange(1, values.shape[1] + 1)
    axes.plot(epochs, values.T, color=drawing.COLOURS[PLAIN], **drawing.SEED)
    seen = axes.get_ylim()
    drawing.draw_band(axes, epochs, student_band(values), PLAIN)
    axes.set_ylim(seen)
    axes.axhline(LITERATURE, color=drawing.GREY, linewidth=0.8, linestyle=":")
    drawing.label(axes, "epoch", "test accuracy")
    drawing.epochs_below(axes)
    drawing.add_title(figure, rows)
    drawing.add_note(
        figure,
        drawing.statistics_note(rows),
        f"ε = {number(rows[0], 'epsilon'):g} at δ = {number(rows[0], 'delta'):g} after "
        f"the last epoch. Dotted: {LITERATURE:.1%} of Tramèr and Boneh (2021).",
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """As accurate as it should be, within the privacy that was promised."""
    return [
        claim(
            "tab04",
            "DP-SGD is as accurate as it should be",
            f"After the last epoch test accuracy is above {ENOUGH}.",
            [above("accuracy", list(ends(rows, "test_accuracy").values()), ENOUGH)],
            f"The literature has {LITERATURE}.",
        ),
        claim(
            "tab04",
            "it spends no more than its epsilon",
            "The accountant's epsilon at the end is at most the target.",
            [
                always(
                    "spent",
                    [number(row, "spent") for row in rows],
                    number(rows[0], "epsilon") + 1e-9,
                )
            ],
        ),
    ]
