from dataclasses import replace

import pytest
from paper.figures.made import staged_rows, training_rows

from dome_lab.paper.claims import FAILS, HOLDS
from dome_lab.paper.figures import ext05_controls as ext05
from dome_lab.paper.figures import fig03_mnist_compression as fig03
from dome_lab.paper.tuning import Grid

CONFIG = ext05.Config(
    compared=ext05.variants(
        replace(fig03.SMALL, rate=ext05.RATE),
        ranks=(10,),
        thin_ranks=(10,),
        direction_ranks=(4, 1),
    ),
    grid=Grid(rates=(1e-3,), most_beyond=0),
    num_seeds=3,
)


def made_run(run):
    accuracy = 0.5
    if run.rank is not None and run.removes == "span":
        accuracy = 0.9 if run.layout == "global" else 0.8
        accuracy -= 0.2 if run.direction_rank == 1 else 0.0
    shift = 0.001 * ((7 * run.seed + (run.rank or 0)) % 5)
    yield from training_rows(run, test_accuracy=accuracy + shift)


@pytest.fixture(scope="module")
def verdicts():
    rows = staged_rows(ext05, CONFIG, made_run)
    return {claim.name: claim.verdict for claim in ext05.judge(rows)}


def test_controls_are_judged_against_the_filter_and_against_none(verdicts):
    assert verdicts["DOME, k = 100: ahead of no filter"] == HOLDS
    assert verdicts["DOME, k = 10: as good as DOME, k = 100"] == HOLDS
    assert verdicts["random directions, k = 100: as good as DOME, k = 100"] == FAILS
    name = "DOME, one basis per layer, k = 10"
    assert verdicts[f"{name}: as good as DOME, k = 100"] == FAILS
    assert verdicts[f"{name}: ahead of no filter"] == HOLDS


def test_directions_of_low_rank_are_judged_against_as_many_exact_ones_too(verdicts):
    whole, thin = (
        "DOME, directions of rank 4, k = 10",
        "DOME, directions of rank 1, k = 10",
    )
    assert verdicts[f"{whole}: as good as DOME, k = 10"] == HOLDS
    assert verdicts[f"{whole}: as good as DOME, k = 100"] == HOLDS
    assert verdicts[f"{thin}: as good as DOME, k = 10"] == FAILS
    assert verdicts[f"{thin}: ahead of no filter"] == HOLDS
    (part,) = (p for p in ext05.parts(CONFIG) if p.compared[-1].direction_rank == 1)
    assert [run.rank for run in part.compared] == [None, 100, 10, 10]


def test_what_sends_more_bytes_is_compared_with_what_sends_as_many(verdicts):
    power = "PowerSGD, feedback, rate 28"
    assert verdicts[f"{power}: as good as DOME, k = 100, rate 28"] == FAILS
    assert not any("rate 28" in n and n.endswith("no filter") for n in verdicts)


def test_every_control_has_a_name_of_its_own():
    rows = staged_rows(ext05, CONFIG, made_run)
    judged = {row["seed"] for row in rows if row["split"] == "test"}
    assert judged == {0, 1, 2}
    names = {ext05._name(run.columns()) for run in CONFIG.compared}
    assert len(names) == len(CONFIG.compared)


def test_a_control_needs_no_other():
    parts = ext05.parts(CONFIG)
    rows = staged_rows(ext05, parts[0], made_run)
    names = [claim.name for claim in ext05.judge(rows)]
    assert names == [
        "DOME, k = 100: ahead of no filter",
        "random directions, k = 100: ahead of no filter",
        "random directions, k = 100: as good as DOME, k = 100",
    ]
    assert {run for part in parts for run in part.compared} == set(CONFIG.compared)
