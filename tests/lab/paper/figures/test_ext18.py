from dataclasses import replace

import pytest
from paper.figures.made import staged_rows

from dome_lab.paper.claims import FAILS, HOLDS
from dome_lab.paper.figures import ext04_tuned as ext04
from dome_lab.paper.figures import ext18_equal_time as ext18
from dome_lab.paper.statistics import select
from dome_lab.paper.tuning import Grid, cases_of

GRID = Grid(rates=(1e-3, 3e-3), most_beyond=0)
FIRST = ext18.Problem(
    case=replace(ext04.MNIST, rate=100, epochs=4), grid=GRID, plain_epochs=7
)
SECOND = replace(FIRST, case=replace(FIRST.case, rate=1000))
CONFIG = ext18.Config(problems=(FIRST, SECOND), screened=(FIRST,), num_seeds=3)
# Within 0.02 of the best, (20, 20) has the fewest directions per step.
SCREENED = {(5, 100): 0.8, (10, 100): 0.81, (20, 20): 0.795, (20, 10): 0.78}
PLAIN_STEP, SELDOM_STEP = 1.0, 1.5


def made_run(run):
    for epoch in range(1, run.epochs + 1):
        accuracy, seconds = 0.1 * epoch, PLAIN_STEP
        if run.rank is not None:
            accuracy = SCREENED.get((run.update_every, run.rank), 0.7)
            seconds = 2.0 if run.update_every == 1 else SELDOM_STEP
        better = 0.001 * (run.lr == 3e-3)
        yield run.columns() | {
            "epoch": epoch,
            "test_accuracy": accuracy + better + 0.001 * run.seed * epoch,
            "processor_seconds": seconds,
            "plain_seconds": PLAIN_STEP,
        }


@pytest.fixture(scope="module")
def rows():
    made = staged_rows(ext18, CONFIG, made_run)
    # A seed of one arm is moved: seeds that agree to the last digit have no interval.
    return [
        row | {"test_accuracy": row["test_accuracy"] + 0.01}
        if (row["seed"], row["arm"]) == (1, "filtered")
        else row
        for row in made
    ]


def test_of_settings_near_the_best_the_cheapest_is_judged_on_every_problem(rows):
    judged = select(rows, split="test", arm="filtered")
    settings = {(row["rate"], row["update_every"], row["rank"]) for row in judged}
    assert settings == {(100, 20, 20), (1000, 20, 20)}


def test_settings_are_tried_on_the_screened_problem_by_one_seed_that_is_not_judged(
    rows,
):
    tried = [r for r in rows if r["update_every"] > 1 and r["rank"] != 20]
    assert {row["seed"] for row in tried} == {100}
    assert {row["split"] for row in tried} == {"validation"}
    assert {row["rate"] for row in tried} == {100}


def test_the_unfiltered_arm_gets_the_seconds_of_the_seldom_updated_filter(rows):
    for case in cases_of(rows):
        assert (case.epochs, case.long_epochs) == (4, 6)
    paced = select(rows, paced=True)
    assert {(row["rank"], row["update_every"]) for row in paced} == {(20, 20)}
    assert {row["split"] for row in paced} == {"validation"}


def test_unfiltered_trials_are_those_of_ext04_where_it_has_them():
    for problem in ext18.SCALES["cpu"].problems[:5]:
        assert problem.case in ext04.SCALES["cpu"].cases


def test_both_comparisons_are_judged_and_name_the_setting(rows):
    claims = {claim.name: claim for claim in ext18.judge(rows)}
    by_bytes = claims["MNIST, Adam, rate 100: ahead after as many bytes"]
    by_seconds = claims["MNIST, Adam, rate 100: ahead after as many seconds"]
    assert by_bytes.numbers["gain"] == pytest.approx(0.4, abs=0.01)
    assert by_bytes.verdict == HOLDS
    assert by_seconds.numbers["gain"] == pytest.approx(0.2, abs=0.02)
    assert "k = 20, basis updated every 20 steps." in by_seconds.statement


def test_a_filter_that_is_behind_in_equal_time_is_said_to_be(rows):
    worse = [
        row | {"test_accuracy": 0.5 - 0.003 * row["seed"] ** 2}
        if row["arm"] == "filtered"
        else row
        for row in rows
    ]
    verdicts = {c.name.partition(": ")[2]: c.verdict for c in ext18.judge(worse)}
    assert verdicts["ahead after as many bytes"] == HOLDS
    assert verdicts["ahead after as many seconds"] == FAILS


def test_a_problem_whose_runs_are_all_there_is_judged_before_the_others(rows):
    first, second = ext18.parts(CONFIG)
    assert first.problems == (FIRST,)
    assert second.screened == CONFIG.screened
