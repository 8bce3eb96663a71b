"""Accuracy on the tasks learned so far, on split and permuted MNIST, task by task.

Not in the paper, which names elastic weight consolidation (EWC) as a use. Claims: EWC
forgets less than plain training, and on filtered gradients less than on plain ones. In
the filtered arms training is filtered, and with EWC the Fisher diagonal is that of
filtered gradients, while the penalty is added behind the filter.

Scale cpu: 3,000 training and 2,000 test images, five tasks, B = 64, 3 seeds; split: 600
images a task, 8 epochs; permuted: 3,000 images a task, 2 epochs. The basis is updated
on every fourth step. Two core-minutes.

Strengths of the penalty are those with the best mean accuracy in trials with seeds 100
to 102, which are not judged (benchmarks/ewc_penalties.py), among those that diverged in
no run. A first choice, from one such seed, had been 1,000 (split) and 30 (permuted) on
plain gradients and 1,000 and 100 on filtered ones: on plain ones three of six judged
runs diverged, on filtered ones one of six nearly did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.continual import compute_continual
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, STREAMS, Run
from dome_lab.paper.statistics import curves, ends, select, stacked, student_band

PAPER = Run(
    task="mnist",
    model="relu_mlp",
    seed=0,
    batch_size=64,
    epochs=10,
    lr=0.1,
    rank=20,
    update_every=4,
    stream="split",
)
# By whether gradients are filtered and whether there is a penalty.
NAMES = {
    (PLAIN, False): "plain",
    (PLAIN, True): "EWC",
    (FILTERED, False): "filtered",
    (FILTERED, True): "EWC, filtered",
}
LINES = dict(zip(NAMES.values(), ((0, (1, 1)), "--", "-.", "-"), strict=True))
COLOURS = dict(
    zip(NAMES.values(), ("#999999", "#D55E00", "#56B4E9", "#0072B2"), strict=True)
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run, epochs a task and penalties by stream, and number of seeds.

    Attributes:
        run: A run.
        epochs: Epochs a task, by stream.
        penalties: Strength of EWC, by stream: on plain and on filtered gradients.
        num_seeds: How many seeds.
    """

    run: Run = PAPER
    epochs: Mapping[str, int] = field(
        default_factory=lambda: {"split": 10, "permuted": 10}
    )
    penalties: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"split": (300, 1000), "permuted": (10, 30)}
    )
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(PAPER, num_train=3000, num_test=2000),
        epochs={"split": 8, "permuted": 2},
        num_seeds=3,
    ),
    "smoke": Config(
        run=replace(
            PAPER, task="digits", num_train=100, num_test=50, batch_size=10, rank=2
        ),
        epochs={"split": 1, "permuted": 1},
        penalties={"split": (10, 10), "permuted": (10, 10)},
        num_seeds=2,
    ),
}
compute_run = compute_continual


def runs(config: Config) -> list[Run]:
    """With and without filter and penalty, on both streams, for every seed."""
    return [
        replace(
            config.run,
            stream=stream,
            epochs=config.epochs[stream],
            rank=config.run.rank if arm == FILTERED else None,
            penalty=config.penalties[stream][arm == FILTERED] if penalised else None,
            seed=seed,
        )
        for stream in STREAMS
        for arm, penalised in NAMES
        for seed in range(config.num_seeds)
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Mean accuracy on the tasks learned so far, a panel a stream."""
    figure, (panels,) = drawing.canvas(1, len(STREAMS), drawing.PAGE, 3.0)
    for axes, stream in zip(panels, STREAMS, strict=True):
        for name, mine in _arms(rows, stream).items():
            runs = stacked(curves(mine, "test_accuracy"))
            band = student_band(runs)
            x = np.arange(1, runs.shape[1] + 1)
            style: dict[str, Any] = {"color": COLOURS[name], "linestyle": LINES[name]}
            axes.plot(x, runs.T, **style, **drawing.SEED)
            axes.plot(x, band.mean, label=name, linewidth=1.3, **style)
            axes.fill_between(
                x, band.low, band.high, color=COLOURS[name], alpha=0.18, linewidth=0
            )
        drawing.epochs_below(axes)
        drawing.label(axes, "tasks learned", "accuracy on them", f"{stream} MNIST")
    drawing.add_title(figure, rows, panels[0])
    drawing.add_note(
        figure,
        drawing.statistics_note(rows),
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Less forgetting with EWC than without, and with the filter than without."""
    pairs = (
        ("EWC forgets less than plain training", "EWC", "plain"),
        ("EWC forgets less on filtered gradients", "EWC, filtered", "EWC"),
        ("EWC adds to filtering alone", "EWC, filtered", "filtered"),
    )
    return [
        claim(
            "tab03",
            f"{stream}: {name}",
            f"Accuracy on all tasks after the last is higher with “{after}” than with "
            f"“{before}”.",
            [
                paired(
                    "change of accuracy on all tasks",
                    ends(_arms(rows, stream)[after], "test_accuracy"),
                    ends(_arms(rows, stream)[before], "test_accuracy"),
                    low=0,
                )
            ],
        )
        for stream in STREAMS
        for name, after, before in pairs
    ]


def _arms(rows: Sequence[Row], stream: str) -> dict[str, list[Row]]:
    mine = select(rows, stream=stream)
    return {
        name: [r for r in select(mine, arm=arm) if (r["penalty"] is not None) == has]
        for (arm, has), name in NAMES.items()
    }
