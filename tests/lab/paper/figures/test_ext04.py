from dataclasses import replace

import pytest
from paper.figures.made import staged_rows

from dome_lab.paper.claims import FAILS, HOLDS
from dome_lab.paper.figures import ext04_tuned as ext04
from dome_lab.paper.tuning import Grid, cases_of

CASE = replace(ext04.MNIST, rate=100, epochs=4)
CONFIG = ext04.Config(
    cases=(CASE,), adam=Grid(rates=(1e-3, 3e-3, 1e-2), most_beyond=0), num_seeds=3
)
# The unfiltered arm is best at 1e-2 in a short run and at 3e-3 in a long one.
BEST = {4: 1e-2, 8: 3e-3}


def made_run(run):
    for epoch in range(1, run.epochs + 1):
        if run.rank is not None:
            accuracy, seconds = 0.8 if run.lr == 3e-3 else 0.5, 2.0
        else:
            is_best = BEST.get(epoch) == run.lr
            accuracy, seconds = (0.1 * epoch if is_best else 0.2), 1.0
        yield run.columns() | {
            "epoch": epoch,
            "test_accuracy": accuracy + 0.001 * run.seed * (epoch / run.epochs) ** 2,
            "processor_seconds": seconds,
        }


@pytest.fixture(scope="module")
def rows():
    made = staged_rows(ext04, CONFIG, made_run)
    # A seed of one arm is moved: seeds that agree to the last digit have no interval.
    return [
        row | {"test_accuracy": row["test_accuracy"] + 0.01}
        if (row["seed"], row["arm"]) == (1, "filtered")
        else row
        for row in made
    ]


def test_seeds_that_choose_are_not_judged_and_choose_on_validation(rows):
    seeds = {split: set() for split in ("validation", "test")}
    for row in rows:
        seeds[row["split"]].add(row["seed"])
    assert seeds == {"validation": {100, 101}, "test": {0, 1, 2}}


def test_each_arm_has_its_own_rate_and_the_longer_one_another(rows):
    (case,) = cases_of(rows)
    assert (case.epochs, case.long_epochs) == (4, 8)
    assert case.rate_of("filtered") == 3e-3
    assert case.rate_of("plain") == 1e-2
    assert case.rate_of("plain", long=True) == 3e-3
    assert case.name == "MNIST, Adam, rate 100"


def test_arms_are_compared_after_as_many_epochs_and_after_as_many_seconds(rows):
    by_bytes, by_seconds, _ = ext04.judge(rows)
    assert by_bytes.numbers["gain"] == pytest.approx(0.4, abs=0.01)
    assert by_bytes.verdict == HOLDS
    assert by_seconds.numbers["gain"] == pytest.approx(0.0, abs=0.01)
    assert by_seconds.verdict != HOLDS


def test_a_filter_that_is_behind_is_said_to_be(rows):
    worse = [
        row | {"test_accuracy": 0.1 - 0.003 * row["seed"] ** 2}
        if row["arm"] == "filtered"
        else row
        for row in rows
    ]
    assert {claim.verdict for claim in ext04.judge(worse)} == {FAILS}


def test_where_one_rate_is_best_for_both_the_longer_runs_serve_both():
    config = replace(CONFIG, adam=Grid(rates=(3e-3,), most_beyond=0))
    rows = staged_rows(ext04, config, made_run)
    judged = [row for row in rows if row["split"] == "test" and row["rank"] is None]
    assert {row["epochs"] for row in judged} == {8}
    (case,) = cases_of(rows)
    assert case.plain is not case.filtered
    assert case.plain_ends() == pytest.approx({0: 0.2, 1: 0.20025, 2: 0.2005})


def test_both_data_sets_have_every_rate_and_sgd_has_two():
    kinds = [(c.task, c.optimizer, c.rate) for c in ext04.SCALES["cpu"].cases]
    assert kinds[0] == ("mnist", "adam", 100)
    assert len(set(kinds)) == len(kinds) == 12
    sgd = {(task, rate) for task, optimizer, rate in kinds if optimizer == "sgd"}
    assert sgd == {(t, r) for t in ("mnist", "cifar10") for r in (None, 100)}
