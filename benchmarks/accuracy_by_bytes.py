"""The picture of the README: test accuracy against bytes, with the filter and without.

Of the judged runs of figure ext04 with Adam, each arm at its best learning rate.

    python benchmarks/accuracy_by_bytes.py
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from dome_lab.paper import drawing
from dome_lab.paper.drawing import save_picture
from dome_lab.paper.models import resnet8
from dome_lab.paper.rows import Row, read_rows
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.statistics import curves, number, stacked
from dome_lab.paper.tuning import Case, cases_of

ROWS = Path("docs/results/cpu/ext04_tuned.jsonl")
PICTURE = Path("docs/images/accuracy_by_bytes.png")
PANELS = {"MNIST, Adam": 1, "CIFAR-10, Adam": 3}  # and channels of an image
NAMES = {FILTERED: "with dome", PLAIN: "without"}
CLASSES, FLOAT32, MEGA = 10, 4, 1e6


def megabytes(rows: Sequence[Row], channels: int) -> float:
    """What a run has sent after each epoch."""
    dim = sum(p.numel() for p in resnet8(channels, CLASSES).parameters())
    steps = number(rows[0], "num_train") // number(rows[0], "batch_size")
    fewer = number(rows[0], "times_fewer_bits") if rows[0]["rate"] else 1.0
    return steps * dim * FLOAT32 / fewer / MEGA


def draw_arm(axes: Axes, case: Case, arm: str, channels: int) -> None:
    """Mean over seeds after each epoch; the rate next to the last one."""
    # The longer unfiltered run: whatever was sent for it is on the axis.
    rows = case.filtered if arm == FILTERED else case.long
    means = stacked(curves(rows, "test_accuracy")).mean(axis=0)
    sent = [megabytes(rows, channels) * epoch for epoch in range(1, len(means) + 1)]
    style = {"color": drawing.COLOURS[arm], "linestyle": drawing.DASHES[arm]}
    first = case.rate is None
    axes.plot(sent, means, label=NAMES[arm] if first else None, **style)
    axes.plot(sent[-1], means[-1], drawing.MARKERS[arm], color=style["color"])
    if arm == FILTERED:
        name = "not compressed" if first else f"÷ {case.rate:,g}"
        axes.annotate(
            name,
            (sent[-1], means[-1]),
            (0, 5),
            textcoords="offset points",
            fontsize=drawing.TEXT - 1,
            ha="center",
        )


def draw() -> None:
    """One panel for each data set."""
    cases = cases_of(read_rows(ROWS))
    figure, (panels,) = drawing.canvas(1, len(PANELS), drawing.PAGE, 3.2)
    for axes, (group, channels) in zip(panels, PANELS.items(), strict=True):
        for case in (case for case in cases if case.group == group):
            for arm in (PLAIN, FILTERED):
                draw_arm(axes, case, arm, channels)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        drawing.label(axes, "megabytes sent", "test accuracy", group.split(",")[0])
        axes.margins(y=0.1)
    panels[0].legend(fontsize=drawing.TEXT, frameon=False, loc="lower right")
    drawing.add_note(
        figure,
        "ResNet-8, B = 128, 5,000 to 6,000 images, k = 100, Gaussian sketch, mean of "
        "five seeds. Each arm at its own best learning rate, chosen on other images by "
        "other seeds. The unfiltered arm trains for as many seconds as the filtered "
        "one, about twice as many epochs.",
    )
    save_picture(figure, PICTURE)


if __name__ == "__main__":
    draw()
