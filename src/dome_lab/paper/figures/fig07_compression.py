"""Test accuracy on MNIST and CIFAR-10 by compression rate, with and without the filter.

Claims: as fig03, on both data sets. The MNIST half is fig03's.

Scale cpu: as fig03; of CIFAR-10, too, one epoch of 25,000 images, half of
the data set: all that were at hand. At rate 1,000, of which three seeds left the claim
undecided, it has 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim
from dome_lab.paper.drawing import subset_name
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.statistics import distinct, select
from dome_lab.paper.tolerance import (
    Rates,
    across_rates,
    draw_tolerance,
    judge_tolerance,
)

CIFAR = replace(fig03.PAPER, task="cifar10")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure: fig03's for MNIST, a run and the rates for CIFAR-10.

    Attributes:
        mnist: As there.
        cifar: A run of the other half.
        rates: Its compression.
        num_seeds: How many seeds it has,
        num_seeds_harshest: and at the harshest rate, if that is more.
    """

    mnist: fig03.Config = fig03.SCALES["paper"]
    cifar: Run = CIFAR
    rates: Rates = fig03.SCALES["paper"].rates
    num_seeds: int = 5
    num_seeds_harshest: int = 0


SCALES = {
    "paper": Config(),
    "cpu": Config(
        mnist=fig03.SCALES["cpu"],
        cifar=replace(CIFAR, num_test=2000, epochs=1),
        rates=fig03.SCALES["cpu"].rates,
        num_seeds=3,
        num_seeds_harshest=8,
    ),
    "smoke": Config(
        mnist=fig03.SCALES["smoke"],
        cifar=replace(fig03.SCALES["smoke"].run, num_classes=5),
        rates=fig03.SCALES["smoke"].rates,
        num_seeds=2,
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Both arms of every rate and seed, on both data sets."""
    cifar = across_rates(config.cifar, config.rates, config.num_seeds)
    harshest = (max(rate for rate in config.rates if rate is not None),)
    more = across_rates(config.cifar, harshest, config.num_seeds_harshest)
    return list(dict.fromkeys([*fig03.runs(config.mnist), *cifar, *more]))


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rate, a panel a data set."""
    halves = _halves(rows)
    figure, (axes,) = drawing.canvas(1, len(halves), drawing.PAGE, 3.1)
    notes = []
    for one, (name, half) in zip(axes, halves.items(), strict=True):
        draw_tolerance(one, half)
        one.set_title(name, fontsize=drawing.TEXT)
        paper = CIFAR if half[0]["task"] == CIFAR.task else fig03.PAPER
        notes.append(f"{name}: {_seeds_note(half)} {drawing.scale_note(half, paper)}")
    drawing.add_title(figure, rows, axes[0])
    drawing.add_note(figure, *notes)
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Similar at low compression, ahead at high, on each data set."""
    return [
        one
        for name, half in _halves(rows).items()
        for one in judge_tolerance("fig07", half, f"{name}: ")
    ]


def _seeds_note(rows: Sequence[Row]) -> str:
    """How many seeds there are, and where there are more."""
    usual = select(rows, rate=None)
    note = drawing.statistics_note(usual, "bars")
    most = len({row["seed"] for row in rows})
    if most > len({row["seed"] for row in usual}):
        note += f" At rate {max(distinct(rows, 'rate')):,g} {most} seeds."
    return note


def _halves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each data set by its name, MNIST first."""
    found = {(row["task"], row["num_classes"]) for row in rows}
    return {
        subset_name(task, classes): select(rows, task=task, num_classes=classes)
        for task, classes in sorted(found, key=str, reverse=True)
    }
