"""Test accuracy on MNIST by compression rate, Adam with and without the filter.

Claims: similar at low compression; ahead at high compression.

Scale cpu: one epoch of all 60,000 training images, B = 128 as in the paper (469 steps),
2,000 test images, rates none, 10, 100 and 1,000, 3 seeds, which decide every claim.

Scale full: the paper's run, all images for 50 epochs, at rates 1,000 and 100 with 3
seeds and uncompressed with one. One more arm at rate 100: unfiltered at 0.03, the
learning rate that ext04 found for it. And what the filter adds in as many seconds, and
by bytes. About 20 hours of one core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Run
from dome_lab.paper.statistics import distinct, ends, select
from dome_lab.paper.tolerance import (
    Rates,
    across_rates,
    draw_tolerance,
    judge_tolerance,
)
from dome_lab.paper.tuning import Case, draw_way, judge_equal_time, pace_of

PAPER = Run(
    task="mnist",
    model="resnet8",
    seed=0,
    batch_size=128,
    epochs=50,
    optimizer="adam",
    lr=1e-3,
    rank=100,
)


# Of figures with many variants on this one's question, at scale cpu: B = 32 makes four
# times the steps in about the same time.
SMALL = replace(PAPER, num_train=2500, num_test=2000, epochs=6, batch_size=32)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the figure.

    Attributes:
        run: A run of it.
        rates: Compression rates.
        num_seeds: How many seeds.
        once: Rates with one seed only, after the others.
        tuned: Learning rate and compression rate of one more unfiltered arm.
        paced_epochs: Epochs of one more run that tells what the filter costs; 0: none.
    """

    run: Run = PAPER
    rates: Rates = (None, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
    num_seeds: int = 5
    once: Rates = ()
    tuned: tuple[float, float] | None = None
    paced_epochs: int = 0


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(PAPER, num_test=2000, epochs=1),
        rates=(None, 10, 100, 1000),
        num_seeds=3,
    ),
    "full": Config(
        run=replace(PAPER, num_train=60_000),  # all there are
        rates=(1000, 100),
        num_seeds=3,
        once=(None,),
        tuned=(0.03, 100),
        paced_epochs=3,
    ),
    "smoke": Config(
        run=replace(
            PAPER,
            task="digits",
            num_train=48,
            num_test=50,
            rank=10,
            epochs=1,
            batch_size=16,
        ),
        rates=(None, 10, 100, 1000),
        num_seeds=2,
    ),
}
compute_run = train.compute_run


def runs(config: Config) -> list[Run]:
    """Both arms of every rate and seed, the tuned one, and the one for seconds."""
    found = across_rates(config.run, config.rates, config.num_seeds)
    if config.tuned is not None:
        lr, rate = config.tuned
        plain = replace(config.run, rank=None, lr=lr, rate=rate)
        found += [replace(plain, seed=seed) for seed in range(config.num_seeds)]
    if config.paced_epochs:
        run = replace(config.run, rate=config.rates[0])
        found.append(replace(run, epochs=config.paced_epochs, paced=True))
    return [*found, *across_rates(config.run, config.once, 1)]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by rate; of long runs along the way by bytes and seconds."""
    mine, _ = _split(rows)
    cases = _cases(mine, rows)
    width = drawing.PAGE if cases else drawing.COLUMN
    figure, (axes,) = drawing.canvas(1, 3 if cases else 1, width, 3.1)
    draw_tolerance(axes[0], mine)
    for panel, unit in zip(axes[1:], ("gradients", "seconds"), strict=False):
        draw_way(panel, cases, unit)
    drawing.add_title(figure, mine, axes[0])
    drawing.add_note(
        figure,
        drawing.statistics_note(mine, "bars"),
        drawing.scale_note(mine, PAPER),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Similar at low compression, ahead at high; of long runs, in equal time too."""
    mine, tuned = _split(rows)
    claims = judge_tolerance("fig03", mine)
    for row in tuned[:1]:
        filtered = select(mine, arm=FILTERED, rate=row["rate"])
        lr, rate = row["lr"], f"rate {row['rate']:g}"
        ours, theirs = (ends(some, "test_accuracy") for some in (filtered, tuned))
        claims.append(
            claim(
                "fig03",
                f"{rate}: ahead of a tuned unfiltered arm",
                f"At {rate} the filter at learning rate {filtered[0]['lr']:g} has a "
                f"higher test accuracy than the unfiltered arm at {lr:g}.",
                [paired("gain", ours, theirs, low=0)],
            )
        )
    for case in _cases(mine, rows):
        where = "uncompressed: " if case.rate is None else f"rate {case.rate:,g}: "
        arms = [*case.filtered, *case.plain]
        claims += judge_equal_time("fig03", arms, case.pace, "test_accuracy", where)
    return claims


def _cases(rows: Sequence[Row], every: Sequence[Row]) -> list[Case]:
    """Both arms at each rate; none without a paced run among all rows."""
    paced = select(every, paced=True)
    if not paced:
        return []
    pace = pace_of(paced)
    rates, found = [None, *distinct(rows, "rate")], []
    for rate in rates:
        filtered, plain = (select(rows, rate=rate, arm=a) for a in (FILTERED, PLAIN))
        if filtered and plain:
            found.append(Case("MNIST", rate, filtered, plain, plain, pace))
    return found


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows at the filter's learning rate, and those of the tuned unfiltered arm."""
    rows = select(rows, paced=False)
    rates = {row["lr"] for row in rows if row["arm"] == FILTERED}
    mine = [row for row in rows if row["lr"] in rates]
    return mine, [row for row in rows if row["lr"] not in rates]
