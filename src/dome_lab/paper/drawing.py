"""The look all figures share: arms told apart by colour and dash, intervals shaded.

Points are values at the end of training: seeds as dots, mean and t interval as a bar.
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from dome.files import write_bytes
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run, Value
from dome_lab.paper.statistics import Array, Band, ends, student_band

NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "tiny_imagenet": "Tiny ImageNet",
    "dbpedia": "DBPedia-Classes L2",
    "made_text": "made-up text",
    "dbpedia_words": "DBPedia, next word",
    "made_words": "made-up words",
    "gpt": "small GPT",
    "relu_mlp": "MLP",
    "resnet8": "ResNet-8",
    "resnet18": "ResNet-18",
    "transformer": "3-layer Transformer",
    "gaussian": "Gaussian sketch",
    "hadamard": "Hadamard sketch",
    "randomk": "random-k",
    "randomk+feedback": "random-k, feedback",
    "topk+feedback": "top-k, feedback",
    "signsgd+feedback": "signs, feedback",
    "terngrad": "TernGrad",
    "qsgd": "QSGD",
    "powersgd+feedback": "PowerSGD, feedback",
    "tanh_cnn": "small tanh CNN",
    "mlp": "MLP",
    "sgd": "SGD",
    "ema": "averaging momentum",
    "adam": "Adam",
}


def name_of(value: Value) -> str:
    """A value as it is read: "MNIST" for "mnist", "all" for None, 1,000 for 1000."""
    if value is None:
        return "all"
    if isinstance(value, str):
        return NAMES.get(value, value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def subset_name(task: Value, num_classes: Value) -> str:
    """A task's name, with its number of classes if it is not that of all."""
    return name_of(task) + ("" if num_classes is None else f", {num_classes} classes")


# Two of Okabe and Ito's colours, told apart with any colour vision.
COLOURS = {PLAIN: "#D55E00", FILTERED: "#0072B2"}
DASHES = {PLAIN: "--", FILTERED: "-"}
MARKERS = {PLAIN: "s", FILTERED: "o"}
ARM_NAMES = {PLAIN: "unfiltered", FILTERED: "DOME-filtered"}
COLUMN = 3.4  # inches, the width of one of the paper's columns
PAGE = 6.9
TEXT, NOTE = 8, 6  # points
GREY = "#555555"
# More of theirs, for what is no arm.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DOTS = 250  # an inch
SEED: dict[str, Any] = {"linewidth": 0.4, "alpha": 0.5}  # a line of one seed
_NOTED = {  # what a note says of a column that is not as in the paper
    "task": "{}",
    "model": "{}",
    "num_classes": "classes {}",
    "num_train": "training samples {}",
    "num_test": "test samples {}",
    "epochs": "epochs {}",
    "batch_size": "B = {}",
    "optimizer": "{}",
    "lr": "learning rate {}",
    "momentum": "momentum {}",
    "rank": "k = {}",
}


def canvas(
    num_rows: int, num_columns: int, width: float, height: float
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of this size in inches, and its axes row by row."""
    figure = Figure((width, height), DOTS, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#E4E4E4", linewidth=0.5)
        one.set_axisbelow(True)
        one.tick_params(labelsize=TEXT - 1, color=GREY, width=0.6)
    return figure, [list(row) for row in axes]


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name the axes, and say above them what they show."""
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    if title:
        axes.set_title(title, fontsize=TEXT)


def name_row(axes: Axes, name: str) -> None:
    """Put a name before the label of the first axes of a row."""
    axes.set_ylabel(f"{name}\n{axes.get_ylabel()}", fontsize=TEXT)


def draw_band(
    axes: Axes,
    x: Sequence[float] | Array,
    band: Band,
    arm: str,
    **style: Any,  # noqa: ANN401 - matplotlib's own
) -> None:
    """A mean line and its shaded interval, in the arm's colour."""
    line: dict[str, Any] = {"label": ARM_NAMES[arm], "linestyle": DASHES[arm]}
    draw_line(axes, x, band, COLOURS[arm], **(line | style))


def draw_line(
    axes: Axes,
    x: Sequence[float] | Array,
    band: Band,
    colour: str,
    **style: Any,  # noqa: ANN401 - matplotlib's own
) -> None:
    """A mean line and its shaded interval."""
    axes.plot(x, band.mean, color=colour, **({"linewidth": 1.3} | style))
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)


def add_title(
    figure: Figure, rows: Sequence[Row], axes: Axes | None = None, side_by_side: int = 2
) -> None:
    """Say above everything what was trained, and which line of ``axes`` is which."""
    columns = ("task", "model", "optimizer")
    found = [list(dict.fromkeys(name_of(row[c]) for row in rows)) for c in columns]
    tasks, *others = found
    parts = [" and ".join(names) for names in others]
    if len(tasks) == 1:
        number = rows[0]["num_classes"]
        parts.insert(0, tasks[0] + (f" ({number} classes)" if number else ""))
    title = ", ".join(parts)
    if axes is None:
        figure.suptitle(title, fontsize=TEXT)
        return
    figure.legend(
        *axes.get_legend_handles_labels(),
        title=title,
        title_fontsize=TEXT,
        loc="outside upper center",
        ncols=side_by_side,
        fontsize=TEXT - 1,
        frameon=False,
    )


def epochs_below(axes: Axes) -> None:
    """Whole numbers below, few enough to be read."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def same_height(column: Sequence[Axes]) -> None:
    """Give axes that are to be compared one scale."""
    ends = [axes.get_ylim() for axes in column]
    for axes in column:
        axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def log_below(axes: Axes, ticks: Sequence[float], names: dict[float, str]) -> None:
    """A logarithmic axis with ticks at these values, under other names if given."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: names.get(x, f"{x:,g}")))
    axes.xaxis.set_minor_locator(NullLocator())


def mark(axes: Axes, x: float, name: str) -> None:
    """A dotted line across, with its name at the top."""
    axes.axvline(x, color=GREY, linestyle=":", linewidth=0.9)
    axes.annotate(
        name,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(2, -1),
        textcoords="offset points",
        va="top",
        fontsize=TEXT - 1,
        color=GREY,
    )


def add_note(figure: Figure, *sentences: str) -> None:
    """Small type below everything."""
    characters = int(figure.get_figwidth() * 21)  # at this size, measured
    text = textwrap.fill(" ".join(s for s in sentences if s), characters)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=NOTE, color=GREY)


def statistics_note(rows: Sequence[Row], what: str = "shaded") -> str:
    """How many seeds there are, and what shows the interval."""
    num_seeds = len({row["seed"] for row in rows})
    return (
        f"Mean of {num_seeds} seeds, each a dot or thin line; {what}: 95% t interval."
    )


def extension_note(rows: Sequence[Row], varied: Sequence[str] = ()) -> str:
    """The settings of what the paper has no experiment on.

    Args:
        rows: What was computed.
        varied: Columns that vary within the figure, of which nothing is said.
    """
    parts = [
        form.format(_listed(values))
        for column, form in _NOTED.items()
        if column not in (*varied, "task", "model", "optimizer")
        and (values := _values(rows, column)) not in ([], [None], [0.0])
    ]
    return f"Beyond the paper: {', '.join(parts)}."


def scale_note(
    rows: Sequence[Row], paper: Run, num_seeds: int = 5, varied: Sequence[str] = ()
) -> str:
    """Which scale this is: everything that is not as in the paper, by name.

    Args:
        rows: What was computed.
        paper: A run with the paper's settings.
        num_seeds: How many seeds the paper has.
        varied: Columns that vary within the figure, of which nothing is said.
    """
    parts = [
        form.format(_listed(_values(rows, column))) + f" ({name_of(wanted)})"
        for column, form in _NOTED.items()
        if column not in varied
        and _values(rows, column) != [wanted := getattr(paper, column)]
        and not (column == "rank" and not _values(rows, column))
    ]
    if (seeds := len({row["seed"] for row in rows})) != num_seeds:
        parts.append(f"seeds {seeds} ({num_seeds})")
    if not parts:
        return "Settings of the paper."
    return f"Not the paper's scale; the paper's in brackets: {', '.join(parts)}."


def _values(rows: Sequence[Row], column: str) -> list[Value]:
    """The values of a column; arms without a rank say nothing about the rank."""
    found = {row[column] for row in rows}
    if column == "rank":
        found.discard(None)
    return sorted(found, key=lambda value: (str(type(value)), value))


def _listed(values: Sequence[Value]) -> str:
    if len(values) > 2 and all(isinstance(v, int | float) for v in values):
        return f"{name_of(values[0])} to {name_of(values[-1])}"
    return ", ".join(map(name_of, values))


SEED_DOT: dict[str, Any] = {
    "linestyle": "none",
    "marker": ".",
    "markersize": 4,
    "alpha": 0.5,
    "zorder": 2,
}

Seeds = Sequence[float]  # one value a seed


def end_values(rows: Sequence[Row], column: str = "test_accuracy") -> list[float]:
    """The value after the last epoch of each seed."""
    return list(ends(rows, column).values())


def point_band(values: Sequence[Seeds]) -> Band:
    """Means of several points and their 95 % t intervals."""
    bands = [student_band(np.asarray(seeds)[:, None]) for seeds in values]
    return Band(
        np.concatenate([band.mean for band in bands]),
        np.concatenate([band.low for band in bands]),
        np.concatenate([band.high for band in bands]),
    )


def draw_points(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[Seeds],
    colour: str,
    **style: Any,  # noqa: ANN401 - matplotlib's own
) -> None:
    """Points beside each other.

    Args:
        axes: Where.
        x: Where each point is.
        values: The seeds of each point.
        colour: Of all of them.
        **style: Of the line through the means.
    """
    band = point_band(values)
    for place, seeds in zip(x, values, strict=True):
        axes.plot([place] * len(seeds), seeds, color=colour, **SEED_DOT)
    bars = [band.mean - band.low, band.high - band.mean]
    look: dict[str, Any] = {"markersize": 3.5, "linewidth": 1.1, "capsize": 2}
    axes.errorbar(
        x, band.mean, yerr=bars, color=colour, elinewidth=0.8, **(look | style)
    )


def draw_lines(
    axes: Axes,
    values: Sequence[Seeds],
    y: Array,
    colours: Sequence[str],
    name: str | None = None,
) -> None:
    """Points one below the other, each on a line of its own."""
    band = point_band(values)
    axes.hlines(y, band.low, band.high, colors=colours, linewidth=1.2)
    axes.scatter(band.mean, y, c=colours, s=14, zorder=3, label=name)
    for height, seeds, colour in zip(y, values, colours, strict=True):
        axes.plot(seeds, [height] * len(seeds), color=colour, **SEED_DOT)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with; the same bytes every time."""
    kind = path.suffix.removeprefix(".")
    # A date would make every drawing of the same rows a different file.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    drawn = io.BytesIO()  # in memory: what draws does not notice a disk that is full
    figure.savefig(drawn, format=kind, metadata=metadata)
    write_bytes(path, drawn.getvalue())
