"""A picture of docs/reproduction.md: accuracy by learning rate of both arms.

Of the trials of figure ext04 at compression rate 100 on MNIST, as far as they are in
docs/results/cpu: validation images, seeds that are never judged.

    python benchmarks/learning_rates.py
"""

from collections.abc import Mapping
from pathlib import Path

from dome_lab.paper import drawing
from dome_lab.paper.pictures import save_picture
from dome_lab.paper.rows import finished_runs, read_rows
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.series import number

ROWS = Path("docs/results/cpu/ext04_tuned.jsonl")
PICTURE = Path("docs/images/learning_rates.png")
RATE, EPOCHS = 100, 10
LONG = "without the filter, for the same time"
NAMES = {
    FILTERED: "with the filter",
    PLAIN: "without, as many epochs and bytes",
    LONG: LONG,
}
LOOKS = {
    FILTERED: ("o-", drawing.COLOURS[FILTERED]),
    PLAIN: ("s--", drawing.COLOURS[PLAIN]),
    LONG: ("^:", "#CC79A7"),
}
Points = dict[float, list[float]]  # accuracies of the seeds, by learning rate


def trials() -> dict[str, Points]:
    """The accuracies of each line."""
    found: dict[str, Points] = {name: {} for name in NAMES}
    seen = set()
    for (_, run), rows in finished_runs(read_rows(ROWS)).items():
        if run.split != "validation" or run.rate != RATE or run.task != "mnist":
            continue
        accuracy = {row["epoch"]: number(row, "test_accuracy") for row in rows}
        # A longer run begins with the shorter one, which may be there as well.
        if (run.arm, run.lr, run.seed) not in seen:
            found[run.arm].setdefault(run.lr, []).append(accuracy[EPOCHS])
            seen.add((run.arm, run.lr, run.seed))
        if run.arm == PLAIN and run.epochs > EPOCHS:
            found[LONG].setdefault(run.lr, []).append(accuracy[run.epochs])
    return found


def draw(found: Mapping[str, Points]) -> None:
    """Seeds as dots, their mean as a line."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.PAGE, 3.4)
    for name, points in found.items():
        look, colour = LOOKS[name]
        rates = sorted(points)
        means = [sum(points[rate]) / len(points[rate]) for rate in rates]
        axes.plot(rates, means, look, color=colour, label=NAMES[name])
        for rate in rates:
            seeds = points[rate]
            axes.plot([rate] * len(seeds), seeds, ".", color=colour, alpha=0.5)
    axes.set_ylim(0.4, 1)
    drawing.log_below(axes, sorted({r for p in found.values() for r in p}), {})
    title = (
        "MNIST, gradients sent 100 times smaller: most of the gap is a learning rate"
    )
    drawing.label(axes, "learning rate", "accuracy on validation images", title)
    axes.legend(fontsize=drawing.TEXT, frameon=False, loc="lower right")
    drawing.add_note(
        figure,
        "ResNet-8, Adam, B = 128, 6,000 training images, 10 epochs with the filter; "
        "k = 100, Gaussian sketch. One or two seeds, each a dot: trials of ext04, from "
        "which learning rates are chosen.",
    )
    save_picture(figure, PICTURE)


if __name__ == "__main__":
    draw(trials())
