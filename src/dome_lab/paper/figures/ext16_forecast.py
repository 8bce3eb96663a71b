"""The forecast of how much harder one may compress, tested on three other problems.

Beyond the paper. ``dome.suggest`` forecasts a factor: an unbiased compressor behind the
filter at that many times the rate has the noise of one without the filter. In ext04 it
was seen after the fact, on one network. Here it is tested on three other problems and
three compressors: the Gaussian sketch, random-k and QSGD.

A prediction is made for each problem first, from 50 batches after one plain epoch, by a
seed that is not judged. No other run is asked for until all predictions are stored.
Then the unfiltered arm at rate R and the filtered arm at the rate that the forecast
gives are compared, each at the best of its own learning rates. The forecast holds where
the filtered arm loses less than 0.02 of accuracy; for the next word less than 0.05 of
the loss, too.

Scale cpu: the Transformer on 6,000 texts of DBPedia, a small GPT on the words of 3,000,
and an MLP on 1,600 images of the first 20 classes of Tiny ImageNet; B = 64; 5 judged
seeds.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

import dome
from dome.compression import QSGD
from dome.planning.suggestion import COPIES
from dome_lab.paper import drawing, train
from dome_lab.paper.arms import LEVELS, times_fewer_bits
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.figures import Found
from dome_lab.paper.figures import ext18_equal_time as ext18
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, TEST, VALIDATION, Run
from dome_lab.paper.statistics import ends, number, select
from dome_lab.paper.tolerance import EQUAL
from dome_lab.paper.tuning import Grid, search

EQUAL_LOSS = 0.05
NUM_BATCHES = 50
BUCKET = 512  # of QSGD
BYTES = 4  # of a number
RATES: Mapping[str, float] = {"gaussian": 30.0, "randomk": 10.0, "qsgd": 6.0}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    Attributes:
        case: The filtered arm, without compression.
        grid: Learning rates that are tried.
    """

    case: Run
    grid: Grid


TEXTS = replace(ext18.TEXTS, rank=20, rate=None, epochs=6)
WORDS = replace(TEXTS, task="dbpedia_words", model="gpt", num_train=3000, num_test=300)
IMAGES = replace(
    TEXTS,
    task="tiny_imagenet",
    model="relu_mlp",
    num_classes=20,
    num_train=1600,
    num_test=400,
    epochs=12,
)
BY_ADAM = Grid(rates=(3e-4, 1e-3, 3e-3, 1e-2))
PROBLEMS = tuple(Problem(case=run, grid=BY_ADAM) for run in (TEXTS, WORDS, IMAGES))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: the problems, the rates without the filter, how many seeds judged."""

    problems: tuple[Problem, ...] = PROBLEMS
    rates: tuple[tuple[str, float], ...] = tuple(RATES.items())
    num_seeds: int = 5


_SMOKE = replace(
    TEXTS,
    task="made_words",
    model="gpt",
    rank=5,
    num_train=120,
    num_test=20,
    batch_size=8,
    epochs=1,
)
SCALES = {
    "paper": Config(),
    "cpu": Config(),
    "smoke": Config(
        problems=(
            Problem(case=_SMOKE, grid=Grid(rates=(1e-3,), seeds=(100,), most_beyond=0)),
        ),
        num_seeds=2,
    ),
}


def forecast_run(problem: Problem) -> Run:
    """The run whose one row is the prediction for a problem."""
    grid = problem.grid
    middle = grid.rates[len(grid.rates) // 2]
    return replace(
        problem.case,
        removes="nothing",
        epochs=1,
        lr=middle,
        seed=grid.seeds[0],
        split=VALIDATION,
    )


def runs(config: Config) -> list[Run]:
    """The predictions: all else waits for them."""
    return [forecast_run(problem) for problem in config.problems]


def later_runs(config: Config, found: Found) -> list[Run]:
    """Trials of both arms, and what is judged where these are over."""
    if not found.keys() >= set(runs(config)):
        return []
    return [
        run
        for problem in config.problems
        for compressor, rate in config.rates
        for arm in arms(problem, compressor, rate, found)
        for run in _tuned(arm, problem.grid, config.num_seeds, found)
    ]


def arms(problem: Problem, compressor: str, rate: float, found: Found) -> list[Run]:
    """The unfiltered arm at a rate, and the filtered one at that of the forecast."""
    (row,) = found[forecast_run(problem)]
    harder = forecast_rate(
        compressor, rate, number(row, "factor"), int(number(row, "dim"))
    )
    plain = replace(problem.case, rank=None, compressor=compressor, rate=rate)
    return [plain, replace(problem.case, compressor=compressor, rate=harder)]


def forecast_rate(compressor: str, rate: float, factor: float, dim: int) -> float:
    """The rate at which what the filter sends has the noise of the whole at ``rate``.

    Args:
        compressor: Which one.
        rate: Without the filter.
        factor: 1 / mean of kept_norm².
        dim: Numbers in a gradient.
    """
    if compressor == "gaussian":  # noise (D + 1)/m
        return _rounded(rate * factor)
    if compressor == "randomk":  # noise rate − 1
        return _rounded(1 + factor * (rate - 1))
    fewer = {levels: times_fewer_bits(QSGD(levels), dim) for levels in LEVELS}
    allowed = factor * _noise(max(s for s in LEVELS if fewer[s] >= rate))
    # LEVELS fall: of those with no more noise, the last has the fewest bits.
    *_, chosen = [s for s in LEVELS if _noise(s) <= allowed] or [LEVELS[0]]
    return max(rate, _rounded(fewer[chosen]))


def _noise(levels: int) -> float:
    """Of QSGD, over ‖g‖²."""
    return min(BUCKET / levels**2, BUCKET**0.5 / levels)


def _rounded(rate: float) -> float:
    """Three digits, downwards: a message may not be too large for its rate."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 2)
    return max(1.0, round(math.floor(rate / unit) * unit, 6))


def _tuned(arm: Run, grid: Grid, num_seeds: int, found: Found) -> list[Run]:
    best = search(arm, grid, found, arm.epochs)
    if isinstance(best, list):
        return best
    return [replace(arm, lr=best, seed=s, split=TEST) for s in range(num_seeds)]


def compute_run(
    run: Run, tell: train.Tell | None = None, keeper: train.Keeper | None = None
) -> Iterator[Row]:
    """The prediction, or the rows of a training run."""
    if run.removes == "nothing":
        yield predicted(run)
    else:
        yield from train.compute_run(run, tell, keeper)


def predicted(run: Run) -> Row:
    """What ``dome.suggest`` says of a problem after a plain epoch."""
    started, worked = time.perf_counter(), time.process_time()
    model, task = train.trained_model(replace(run, rank=None, removes="span"))
    dim = sum(p.numel() for p in model.parameters())
    size, rank = run.batch_size, int(run.rank or 1)
    order = torch.randperm(
        len(task.train_x), generator=torch.Generator().manual_seed(run.seed)
    )
    batches = [
        (task.train_x[part], task.train_y[part])
        for part in order.split(size)[:NUM_BATCHES]
        if len(part) == size
    ]
    # As much memory as bases of this rank take, so that no larger one is tried.
    memory = BYTES * dim * (2 * size + COPIES * rank)
    found = dome.suggest(model, cross_entropy, batches, NUM_BATCHES, memory=memory)
    (chosen,) = [c for c in found.candidates if (c.name, c.rank) == ("global", rank)]
    low, high = chosen.factor_interval
    return run.columns() | {
        "epoch": 1,
        "dim": dim,
        "factor": chosen.factor,
        "factor_low": low,
        "factor_high": high,
        "kept_norm": chosen.kept_norm,
        "share": chosen.share,
        "edge": found.edge,
        "noise_scale": found.noise_scale,
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - worked,
    }


def draw(rows: Sequence[Row]) -> Figure:
    """Test accuracy of both arms, case by case."""
    found = _cases(rows)
    figure, panels = drawing.canvas(1, 1, drawing.PAGE, 3.2)
    axes = panels[0][0]
    for arm, shift in ((PLAIN, -0.12), (FILTERED, 0.12)):
        places = [place + shift for place in range(len(found))]
        values = [list(_ends(case, arm).values()) for case in found.values()]
        look = {"linestyle": "none", "marker": drawing.MARKERS[arm]}
        name = drawing.ARM_NAMES[arm]
        colour = drawing.COLOURS[arm]
        drawing.draw_points(axes, places, values, colour, label=name, **look)
    axes.set_xticks(range(len(found)), [_name(c) for c in found.values()], fontsize=5)
    drawing.label(axes, "", "test accuracy")
    axes.legend(fontsize=drawing.TEXT - 1, frameon=False)
    judged = select(rows, split=TEST)
    drawing.add_note(
        figure,
        drawing.statistics_note(judged, "bars"),
        "Without the filter at the rate named first, with it at the forecast's.",
        drawing.extension_note(judged, varied=["lr", "rate", "compressor", "rank"]),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """For each case: what the filtered arm loses at the rate of the forecast."""
    return [one for case in _cases(rows).values() for one in _judge(case)]


def _judge(case: Sequence[Row]) -> list[Claim]:
    plain, harder = (_rate(case, arm) for arm in (PLAIN, FILTERED))
    rates = ", ".join(
        f"{number(select(case, arm=arm)[0], 'lr'):g} {words}"
        for arm, words in ((FILTERED, "with the filter"), (PLAIN, "without"))
    )
    both = (_ends(case, FILTERED), _ends(case, PLAIN))
    findings = [paired("difference of accuracy", *both, low=-EQUAL)]
    if "words" in str(case[0]["task"]):
        ours, plain_losses = (
            ends(select(case, arm=arm), "test_loss") for arm in (FILTERED, PLAIN)
        )
        findings.append(
            paired("difference of loss", ours, plain_losses, high=EQUAL_LOSS)
        )
    return [
        claim(
            "ext16",
            f"{_name(case)}: the forecast holds",
            f"At rate {harder:,.4g} with the filter test accuracy is at most {EQUAL} "
            f"below that at rate {plain:,.4g} without.",
            findings,
            f"Learning rate {rates}.",
        )
    ]


def _cases(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The judged rows by task and compressor, where both arms are there."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in select(rows, split=TEST):
        found.setdefault((str(row["task"]), str(row["compressor"])), []).append(row)
    whole = {PLAIN, FILTERED}
    return {k: some for k, some in found.items() if {r["arm"] for r in some} == whole}


def _ends(case: Sequence[Row], arm: str) -> dict[int, float]:
    return ends(select(case, arm=arm), "test_accuracy")


def _rate(case: Sequence[Row], arm: str) -> float:
    return number(select(case, arm=arm)[0], "rate")


def _name(case: Sequence[Row]) -> str:
    task, compressor = (str(case[0][column]) for column in ("task", "compressor"))
    names = drawing.NAMES
    return (
        f"{names.get(task, task)}, {names.get(compressor, compressor)}, "
        f"{_rate(case, PLAIN):.4g} → {_rate(case, FILTERED):.4g}"
    )
