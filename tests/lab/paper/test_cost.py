from dataclasses import replace
from pathlib import Path

import pytest

from dome_lab.paper.cost import (
    TimeLeft,
    guessed_seconds,
    kind_of,
    share_of_row,
)
from dome_lab.paper.rows import read_runs
from dome_lab.paper.run import Run

RUN = Run(task="digits", model="resnet8", seed=0, batch_size=32, epochs=4)


def keys(*seeds, **changes):
    return [("train", replace(RUN, seed=seed, **changes)) for seed in seeds]


def test_before_anything_is_measured_the_time_is_that_of_committed_rows():
    one, other = keys(0, 1, task="mnist", num_train=1000)
    time_left = TimeLeft([one, other], num_workers=1)
    assert time_left.seconds == 2 * guessed_seconds(one[1])
    assert guessed_seconds(one[1]) == pytest.approx(4 * 1000 * 1.0e-3)
    assert time_left.share_done == 0


def test_the_first_epoch_corrects_the_estimates_of_all_kinds():
    (plain,), (filtered,) = keys(0), keys(0, rank=50)
    time_left = TimeLeft([plain, filtered], num_workers=1)
    time_left.learn_from({filtered: [{"seconds": 30.0}]})
    slowness = 3.0
    time_left.advance(plain, slowness * guessed_seconds(plain[1]) / 4, 0.25)
    expected = slowness * (0.75 * guessed_seconds(plain[1]) + 30.0)
    assert time_left.seconds == pytest.approx(expected)


ROWS = Path(__file__).parents[3] / "docs" / "results" / "cpu"
TOLD = ("fig01", "fig03", "fig04", "fig06", "ext04")


@pytest.mark.skipif(not ROWS.exists(), reason="the rows are not part of the package")
@pytest.mark.parametrize("figure", TOLD)
def test_the_estimate_of_a_figure_is_that_of_its_committed_rows(figure):
    (path,) = ROWS.glob(f"{figure}_*.jsonl")
    found = read_runs([path])
    estimated = sum(guessed_seconds(run) for _, run in found)
    columns = ("processor_seconds", "seconds")  # older rows have the second only
    taken = sum(
        next(row[c] for c in columns if row.get(c) is not None)
        for rows in found.values()
        for row in rows
    )
    # Machines and their load differ by as much.
    assert 0.5 < estimated / taken < 2


def test_time_left_follows_from_what_an_epoch_took():
    one, other = keys(0, 1)
    time_left = TimeLeft([one, other], num_workers=1)
    time_left.advance(one, 10.0, share_of_row(one))
    assert time_left.seconds == pytest.approx(3 * 10 + 4 * 10)
    assert time_left.share_done == pytest.approx(1 / 8)


def test_processes_share_the_work_but_not_a_run():
    one, *others = keys(0, 1, 2, 3)
    time_left = TimeLeft([one, *others], num_workers=4)
    time_left.advance(one, 10.0, 0.25)
    assert time_left.seconds == pytest.approx(40)  # not 150/4: a run takes 40
    time_left = TimeLeft([one, *others], num_workers=2)
    time_left.advance(one, 10.0, 0.25)
    assert time_left.seconds == pytest.approx(150 / 2)


def test_other_kinds_are_guessed_from_those_seen():
    (plain,), (filtered,) = keys(0), keys(0, rank=50)
    time_left = TimeLeft([plain, filtered], num_workers=1)
    time_left.advance(plain, 10.0, 1.0)
    dearer = guessed_seconds(filtered[1]) / guessed_seconds(plain[1])
    assert dearer > 1
    assert time_left.seconds == pytest.approx(10 * dearer)


def test_each_kind_counts_as_it_was_seen():
    (plain,), (filtered,) = keys(0), keys(0, rank=50)
    time_left = TimeLeft([plain, filtered], num_workers=1)
    time_left.learn_from({plain: [{"seconds": 10.0}], filtered: [{"seconds": 90.0}]})
    assert time_left.seconds == pytest.approx(100)


def test_rows_of_earlier_sessions_are_learned_from():
    (there,), (missing,) = keys(0), keys(1)
    time_left = TimeLeft([missing], num_workers=1)
    time_left.learn_from({there: [{"seconds": 2.0}, {"seconds": 3.0}, {}]})
    assert time_left.seconds == pytest.approx(5)


def test_a_finished_run_has_nothing_left():
    (one,) = keys(0)
    time_left = TimeLeft([one], num_workers=1)
    time_left.advance(one, 10.0, 0.25)
    time_left.finish(one)
    assert time_left.seconds == 0
    assert time_left.share_done == 1


def test_a_run_whose_rows_are_no_epochs_is_learned_from_when_it_is_over():
    one, other = [("spectrum", replace(RUN, seed=seed)) for seed in (0, 1)]
    time_left = TimeLeft([one, other], num_workers=1)
    for _ in range(5):
        time_left.advance(one, 2.0, share_of_row(one))
    time_left.finish(one)
    assert time_left.seconds == pytest.approx(10)


def test_rows_that_are_not_epochs_do_not_advance_a_run():
    assert share_of_row(("train", RUN)) == 0.25
    assert share_of_row(("spectrum", RUN)) == 0


def test_seeds_and_learning_rates_are_of_one_kind_and_ranks_are_not():
    (key,), (other,) = keys(0), keys(5, lr=0.5)
    assert kind_of(key) == kind_of(other)
    assert kind_of(key) != kind_of(keys(0, rank=3)[0])
    assert kind_of(("spectrum", RUN)) != kind_of(key)
