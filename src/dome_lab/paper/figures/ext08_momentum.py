"""Is momentum a low-pass filter of what DOME removes? On MNIST, without the filter.

Beyond the paper, which has no experiment on what it says of momentum: that averaging
attenuates the quickly varying components of gradients in the outlier subspace, the more
the longer it averages. Along an unfiltered run, how much of the energy of the gradient
and of its averages lies in the tracked subspace.

Scale cpu: a network of linear layers as in ext01, 2,000 training images, B = 32, 8
epochs, SGD without momentum, 3 seeds: a minute of one core.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.figures import ext01_curvature_alignment as ext01
from dome_lab.paper.momentum import BETAS, compute_shares
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Repeated, Run
from dome_lab.paper.series import averages, curves, select, stacked
from dome_lab.paper.statistics import student_band

SCALES = {
    name: replace(config, run=replace(config.run, momentum=0.0, removes="nothing"))
    for name, config in ext01.SCALES.items()
}
NAMES = {beta: f"β = {beta:g}" if beta else "gradient" for beta in BETAS}


def runs(config: Repeated) -> list[Run]:
    """The run with every seed."""
    return [replace(config.run, seed=seed) for seed in range(config.num_seeds)]


compute_run = compute_shares


def draw(rows: Sequence[Row]) -> Figure:
    """The share of energy by epoch, a line an average."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 2.9)
    for (beta, name), colour in zip(NAMES.items(), drawing.PALETTE, strict=False):
        values = stacked(curves(select(rows, beta=beta), "share"))
        epochs = np.arange(1, values.shape[1] + 1)
        axes.plot(epochs, values.T, color=colour, **drawing.SEED)
        drawing.draw_line(axes, epochs, student_band(values), colour, label=name)
    axes.set_ylim(0, 1)
    drawing.label(axes, "epoch", "share of energy in span(U)")
    drawing.epochs_below(axes)
    drawing.add_title(figure, rows, axes)
    drawing.add_note(
        figure, drawing.statistics_note(rows), drawing.extension_note(rows)
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Each average against the one that averages less."""
    claims = []
    for short, long in pairwise(BETAS):
        before, after = (averages(select(rows, beta=b), "share") for b in (short, long))
        claims.append(
            claim(
                "ext08",
                f"less in the subspace than {NAMES[short]}: {NAMES[long]}",
                f"Of the energy of the gradients' average with β = {long:g} less lies "
                f"in span(U) than of “{NAMES[short]}”, mean over epochs.",
                [paired("change of the share", after, before, high=0)],
            )
        )
    return claims
