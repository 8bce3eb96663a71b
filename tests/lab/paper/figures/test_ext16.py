from dataclasses import replace

import pytest
from paper.figures.made import staged_rows, training_rows

from dome_lab.paper.arms import times_fewer_bits
from dome_lab.paper.claims import FAILS, HOLDS
from dome_lab.paper.figures import ext16_forecast as ext16
from dome_lab.paper.statistics import select
from dome_lab.paper.tuning import Grid

GRID = Grid(rates=(1e-3, 3e-3), most_beyond=0)
TEXTS = ext16.Problem(case=ext16.TEXTS, grid=GRID)
WORDS = ext16.Problem(case=ext16.WORDS, grid=GRID)
CONFIG = ext16.Config(problems=(TEXTS, WORDS), num_seeds=3)
FACTOR, DIM = 8.0, 100_000


def made_run(run, loss=0.0, worse=0.0):
    if run.removes == "nothing":
        return [run.columns() | {"epoch": 1, "factor": FACTOR, "dim": DIM}]
    filtered = run.rank is not None
    lost = worse if filtered and run.split == "test" else 0.0
    scatter = 0.001 * run.seed * (1 if filtered else 0.5)
    end = 0.6 - lost + scatter + 0.01 * (run.lr == 3e-3)
    return training_rows(
        run, test_accuracy=end, test_loss=2.0 + loss * filtered + scatter
    )


def verdicts(**how):
    rows = staged_rows(ext16, CONFIG, lambda run: made_run(run, **how))
    return rows, [claim.verdict for claim in ext16.judge(rows)]


def test_no_run_is_asked_for_before_all_predictions_are_there():
    forecasts = ext16.runs(CONFIG)
    assert [run.removes for run in forecasts] == ["nothing", "nothing"]
    assert {run.seed for run in forecasts} == {100}
    assert {run.split for run in forecasts} == {"validation"}
    found = {forecasts[0]: made_run(forecasts[0])}
    assert ext16.later_runs(CONFIG, found) == []
    found[forecasts[1]] = made_run(forecasts[1])
    assert ext16.later_runs(CONFIG, found)


def test_each_arm_has_its_own_learning_rate_and_the_rate_of_the_forecast():
    rows, found = verdicts()
    judged = select(rows, split="test")
    assert {row["seed"] for row in judged} == {0, 1, 2}
    assert {row["lr"] for row in judged} == {3e-3}
    mine = select(judged, task="dbpedia", compressor="gaussian")
    assert {row["rate"] for row in select(mine, arm="plain")} == {30.0}
    assert {row["rate"] for row in select(mine, arm="filtered")} == {240.0}
    assert found == [HOLDS] * 6


def test_a_filtered_arm_that_is_worse_is_told():
    assert verdicts(worse=0.05)[1] == [FAILS] * 6


def test_of_next_words_the_loss_counts_too():
    rows, found = verdicts(loss=0.2)
    claims = ext16.judge(rows)
    assert [c.verdict for c in claims if "next word" in c.name] == [FAILS] * 3
    assert [c.verdict for c in claims if "next word" not in c.name] == [HOLDS] * 3
    assert found


def test_the_rate_of_the_forecast_has_the_same_noise():
    assert ext16.forecast_rate("gaussian", 30, 8.0, DIM) == 240
    # Noise rate - 1: 9 without the filter, 72 of an eighth of the squared norm.
    assert ext16.forecast_rate("randomk", 10, 8.0, DIM) == 73
    for factor in (1.0, 2.0, 8.0, 20.0):
        rate = ext16.forecast_rate("qsgd", 6.0, factor, DIM)
        allowed = [s for s in ext16.LEVELS if fits(s, rate)]
        before = [s for s in ext16.LEVELS if fits(s, 6.0)]
        assert noise(allowed[0]) <= factor * noise(before[0])
    assert ext16.forecast_rate("qsgd", 6.0, 8.0, DIM) > 9


def fits(levels, rate):
    return times_fewer_bits(ext16.QSGD(levels), DIM) >= rate


def noise(levels):
    return min(512 / levels**2, 512**0.5 / levels)


@pytest.mark.parametrize("compressor", ["gaussian", "randomk", "qsgd"])
def test_every_rate_of_the_forecast_can_be_sent(compressor):
    rate = ext16.forecast_rate(compressor, ext16.RATES[compressor], 13.37, DIM)
    assert replace(ext16.TEXTS, compressor=compressor, rate=rate).rate == rate
    if compressor == "qsgd":
        assert rate <= times_fewer_bits(ext16.QSGD(1), DIM)
