from dataclasses import replace

import pytest
from paper.figures.made import staged_rows

from dome_lab.paper.claims import FAILS, HOLDS
from dome_lab.paper.figures import ext17_rank_harm as ext17
from dome_lab.paper.tuning import Grid

PROBLEM = replace(ext17.CIFAR, num_classes=9, epochs=4)
CONFIG = ext17.Config(
    problems=(PROBLEM,), grid=Grid(rates=(1e-3, 3e-3), most_beyond=0), num_seeds=3
)
# Seconds of an epoch, and accuracy in the end: 81 directions are too many.
SECONDS = {None: 1.0, 3: 1.0, 9: 1.5, 27: 2.0, 81: 3.0}
ENDS = {3: 0.6, 9: 0.7, 27: 0.65, 81: 0.3}


def made_run(run):
    for epoch in range(1, run.epochs + 1):
        # The unfiltered arm goes on to learn: 0.4 after 4 epochs, 0.8 after 8.
        accuracy = 0.1 * epoch if run.rank is None else ENDS[run.rank]
        better = 0.001 * (run.lr == 3e-3)
        moved = 0.002 * run.seed * (1 if run.rank is None else -1)
        yield run.columns() | {
            "epoch": epoch,
            "test_accuracy": accuracy + better + moved * (1 + 0.1 * (run.rank or 0)),
            "processor_seconds": SECONDS[run.rank],
            "plain_seconds": SECONDS[None],
        }


@pytest.fixture(scope="module")
def rows():
    return staged_rows(ext17, CONFIG, made_run)


def test_ranks_are_told_by_the_number_of_classes():
    assert ext17.ranks_of(9) == (81, 9, 27, 3)
    assert ext17.ranks_of(2) == (4, 2, 6, 1)


def test_every_rank_is_compared_after_its_own_seconds(rows):
    claims = {claim.name: claim for claim in ext17.judge(rows)}
    found = {}
    for rank in (3, 9, 27, 81):
        name = f"CIFAR-10, 9 classes, k = {rank}: ahead after as many"
        by_epochs, by_seconds = claims[f"{name} epochs"], claims[f"{name} seconds"]
        found[rank] = by_epochs.verdict, by_seconds.verdict
        epochs = round(4 * SECONDS[rank])
        assert f" {epochs} epochs, " in by_seconds.statement
    assert found == {
        3: (HOLDS, HOLDS),
        9: (HOLDS, HOLDS),
        27: (HOLDS, FAILS),
        81: (FAILS, FAILS),
    }


def test_too_many_directions_are_said_to_harm(rows):
    claims = {claim.name: claim for claim in ext17.judge(rows)}
    harm = claims["CIFAR-10, 9 classes: C² directions are as good as C"]
    assert harm.verdict == FAILS
    assert harm.numbers["change"] == pytest.approx(-0.4, abs=0.03)


def test_three_problems_other_than_mnist_have_as_many_steps():
    problems = ext17.SCALES["cpu"].problems
    assert len({run.task for run in problems}) == 3
    assert "mnist" not in {run.task for run in problems}
    steps = {run.num_train // run.batch_size * run.epochs for run in problems}
    assert steps == {200}
