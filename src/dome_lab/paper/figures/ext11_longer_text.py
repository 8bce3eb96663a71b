"""Macro-F1 on DBPedia with and without the filter when training goes on.

Beyond fig06, whose claim it is that macro-F1 becomes similar, as in the paper's five
epochs on all texts. On few texts the filtered arm is ahead after five epochs: do so
few steps explain it? Here the same runs go on for four times as many.

Scale cpu: as fig06, 20 epochs, 5 seeds; nothing watches the unfiltered arm.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing, train
from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.dynamics import draw_panels, judge_similar_end
from dome_lab.paper.figures import fig06_dbpedia_dynamics as fig06
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN, Repeated, Run
from dome_lab.paper.series import ends, number, select

SCORE = "test_macro_f1"
LONGER = 4


def _longer(run: Run) -> Run:
    return replace(run, epochs=LONGER * run.epochs)


SCALES = {
    "paper": Repeated(run=_longer(fig06.PAPER)),
    "cpu": Repeated(run=_longer(fig06.SCALES["cpu"].run), num_seeds=5),
    "smoke": Repeated(
        run=_longer(replace(fig06.SCALES["smoke"].run, num_train=32, epochs=1)),
        num_seeds=2,
    ),
}


def runs(config: Repeated) -> list[Run]:
    """Both arms, seed by seed."""
    return [
        replace(config.run, seed=seed, rank=rank)
        for seed in range(config.num_seeds)
        for rank in (config.run.rank, None)
    ]


compute_run = train.compute_run


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss and macro-F1 by epoch."""
    figure, (axes,) = drawing.canvas(1, 2, drawing.PAGE, 2.9)
    draw_panels(axes, rows, SCORE, watched=False)
    drawing.add_title(figure, rows, axes[0])
    drawing.add_note(
        figure, drawing.statistics_note(rows), drawing.extension_note(rows)
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Whether macro-F1 becomes similar, and whether the lead becomes smaller."""
    epochs = max(number(row, "epoch") for row in rows)
    early = [row for row in rows if number(row, "epoch") <= epochs / LONGER]
    return [
        judge_similar_end("ext11", rows, SCORE),
        claim(
            "ext11",
            "the lead becomes smaller",
            "The filter's lead in macro-F1 after the last epoch is smaller than after "
            "a quarter of the epochs.",
            [paired("change of the lead", _lead(rows), _lead(early), high=0)],
        ),
    ]


def _lead(rows: Sequence[Row]) -> dict[int, float]:
    """By how much macro-F1 is higher with the filter in the end, by seed."""
    filtered, plain = (ends(select(rows, arm=a), SCORE) for a in (FILTERED, PLAIN))
    return {seed: filtered[seed] - plain[seed] for seed in filtered.keys() & plain}
