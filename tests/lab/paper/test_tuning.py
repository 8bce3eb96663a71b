from dataclasses import replace

import pytest

from dome_lab.paper.run import Run
from dome_lab.paper.tuning import Grid, equal_epochs, next_rate, pace_of, search, trial

RUN = Run(task="digits", model="resnet8", seed=0, batch_size=8, epochs=2, rank=2)
GRID = Grid(rates=(1e-3, 3e-3, 1e-2, 3e-2), seeds=(7, 8), most_beyond=1)


def rows(run, accuracies):
    columns = run.columns()
    return [
        columns | {"epoch": epoch, "test_accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]


def tuned(accuracy, epoch=2, grid=GRID):
    """Answer every trial until the search is over; what it chose, and the trials."""
    found = {}
    while isinstance(wanted := search(RUN, grid, found, epoch), list):
        assert any(run not in found for run in wanted)
        found |= {run: rows(run, accuracy(run.lr, run.seed)) for run in wanted}
    return wanted, found


def test_the_rate_with_the_best_validation_accuracy_is_chosen():
    table = {1e-3: 0.2, 3e-3: 0.5, 1e-2: 0.7, 3e-2: 0.6}
    best, found = tuned(lambda rate, seed: (0.0, table[rate]))
    assert best == 1e-2
    assert {run.split for run in found} == {"validation"}


def test_only_the_best_two_are_tried_with_the_other_seed_which_can_decide():
    table = {
        (1e-3, 7): 0.1,
        (3e-3, 7): 0.70,
        (1e-2, 7): 0.72,
        (3e-2, 7): 0.5,
        (3e-3, 8): 0.70,
        (1e-2, 8): 0.60,
    }
    best, found = tuned(lambda rate, seed: (0.0, table[rate, seed]))
    assert best == 3e-3
    assert len(found) == 6


def test_accuracy_counts_after_the_epoch_asked_for():
    early = {1e-3: 0.2, 3e-3: 0.3, 1e-2: 0.5, 3e-2: 0.1}
    late = {1e-3: 0.2, 3e-3: 0.6, 1e-2: 0.5, 3e-2: 0.1}

    def accuracy(rate, seed):
        return early[rate], late[rate]

    assert tuned(accuracy, epoch=1)[0] == 1e-2
    assert tuned(accuracy, epoch=2)[0] == 3e-3


@pytest.mark.parametrize(("sign", "expected"), [(1, 1e-1), (-1, 3e-4)])
def test_a_best_rate_at_an_end_is_searched_beyond_it_but_not_without_end(
    sign, expected
):
    best, found = tuned(lambda rate, seed: (0.0, sign * rate))
    assert best == expected
    assert len({run.lr for run in found}) == 5


def test_of_equal_rates_the_smallest_that_is_not_beyond_the_end_is_chosen():
    best, _ = tuned(lambda rate, seed: (0.0, 0.5), grid=replace(GRID, most_beyond=0))
    assert best == 1e-3


def test_one_seed_is_enough_to_choose():
    table = {1e-3: 0.2, 3e-3: 0.5, 1e-2: 0.7, 3e-2: 0.6}
    best, found = tuned(
        lambda rate, seed: (0.0, table[rate]), grid=replace(GRID, seeds=(7,))
    )
    assert best == 1e-2
    assert len(found) == 4


def test_neighbours_of_a_rate_are_a_half_decade_away():
    up = [1e-4]
    for _ in range(8):
        up.append(next_rate(up[-1], up=True))
    assert up == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
    assert [next_rate(rate, up=False) for rate in up[1:]] == up[:-1]


def test_a_trial_is_the_same_run_on_validation_samples():
    assert trial(RUN, 0.01, 7) == replace(RUN, lr=0.01, seed=7, split="validation")


def test_the_pace_is_that_of_the_median_pair_of_epochs():
    pairs = [(4.0, 1.6), (40.0, 16.0), (90.0, 1.0)]
    rows = [{"processor_seconds": a, "plain_seconds": b} for a, b in pairs]
    assert pace_of(rows) == pytest.approx(2.5)


def test_the_unfiltered_arm_never_gets_less_epochs_than_the_filtered_one():
    assert equal_epochs(10, 2.5) == 25
    assert equal_epochs(10, 0.9) == 10
