from dataclasses import replace

import pytest
from made_rows import FILTERED, run_rows, write_arms, write_loose

from dome_lab.paper.rows import append_run
from dome_lab.report.answers import answers_of
from dome_lab.report.groups import groups_of
from dome_lab.report.pairs import pairs_of
from dome_lab.report.sections import file_sections


def answered(*paths):
    (section,) = file_sections(paths)
    groups = groups_of(section)
    tuned = "chosen" in section.facts
    return answers_of(groups, pairs_of(groups), is_tuned=tuned)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_a_clear_gain_is_told_with_its_interval(path):
    helped, _, removed, directions = answered(write_arms(path))
    assert helped.answer == "Ahead, in 3 seeds"
    # 0.7 - 0.5, and t(2) 0.01 / √3 = 4.3027 · 0.57735 points.
    assert (
        helped.lines[0]
        == "50.0 → 70.0 % accuracy, +20.0 [+17.5, +22.5] points (better)"
    )
    assert helped.lines[1] == "Training loss at the end: clearly lower"
    assert helped.caveat.startswith("Neither arm was tuned")
    assert removed.answer == "60 %"
    assert removed.lines[0].endswith("the same in 3 seeds, no interval")
    assert "lie 80 % of the norm" in removed.lines[1]
    # 8 + 4 are 80 % of 15, 8 + 4 + 2 are 93 %.
    assert directions.answer == "3 of 4"


def test_cost_is_told_beside_the_gain(path):
    append_run(path, run_rows(replace(FILTERED, rank=None), 0.5, processor_seconds=2.0))
    append_run(path, run_rows(FILTERED, 0.7, processor_seconds=5.0))
    _, cost, *_ = answered(path)
    assert cost.answer == "2.5 times the time"
    assert cost.lines[0] == "of an epoch or step without the filter"
    # Four epochs without take as long as 1.6 with: the accuracy is that of all rows.
    assert cost.lines[2] == "50.0 → 70.0 % accuracy, one seed, no interval"


def test_against_a_run_that_a_tracker_watches_no_cost_is_told(path):
    watched = replace(FILTERED, removes="nothing")
    append_run(path, run_rows(watched, 0.5, processor_seconds=4.5))
    append_run(path, run_rows(FILTERED, 0.7, processor_seconds=5.0))
    helped, cost, *_ = answered(path)
    assert helped.is_known
    assert (cost.answer, cost.is_known) == ("Not measured", False)
    assert "tracker watches" in cost.lines[0]


def test_a_cost_that_nobody_noted_is_not_told(path):
    _, cost, *_ = answered(write_arms(path))
    assert (cost.answer, cost.is_known) == ("Not measured", False)


def test_learning_rates_chosen_for_each_arm_do_not_keep_arms_apart(path):
    for seed, shift in enumerate((-0.01, 0.0, 0.01)):
        for run, level in ((replace(FILTERED, rank=None), 0.5), (FILTERED, 0.7)):
            lr = 0.1 if run.rank is None else 0.3
            append_run(
                path, run_rows(replace(run, seed=seed, lr=lr), level + shift * lr)
            )
    assert answered(path)[0].answer == "Cannot be told"
    path.with_suffix(".meta.json").write_text('{"chosen": ["lr"]}')
    helped, *_ = answered(path)
    assert (helped.answer, helped.caveat) == ("Ahead, in 3 seeds", "")


def test_runs_that_chose_a_learning_rate_are_not_compared_themselves(path):
    for seed in range(3):
        for rank, lr, level in ((None, 0.1, 0.5), (4, 0.3, 0.7)):
            run = replace(FILTERED, rank=rank, lr=lr)
            trial = replace(run, seed=seed + 100, split="validation")
            append_run(path, run_rows(trial, 0.1))
            append_run(
                path, run_rows(replace(run, seed=seed), level + 0.01 * seed * lr)
            )
    (section,) = file_sections([path])
    assert section.notes == [
        "Each arm has its own learning rate, chosen on other seeds."
    ]
    assert len(groups_of(section)) == 2
    helped, *_ = answered(path)
    assert (helped.answer, helped.caveat) == ("Ahead, in 3 seeds", "")


def test_what_is_not_clear_is_not_called_a_gain(path):
    helped, *_ = answered(write_arms(path, filtered=0.52, shifts=(-0.3, 0.0, 0.3)))
    assert helped.answer == "No clear difference"
    assert "(unclear)" in helped.lines[0]


def test_a_lower_loss_alone_is_called_that(path):
    helped, *_ = answered(write_arms(path, filtered=0.501))
    assert helped.answer == "Not clearly: lower loss, no clear gain in accuracy"


def test_a_clear_loss_is_called_behind(path):
    helped, *_ = answered(write_arms(path, filtered=0.3))
    assert helped.answer == "Behind, in 3 seeds"
    assert "(worse)" in helped.lines[0]


def test_where_it_helps_is_named(path):
    write_arms(path, filtered=0.5)
    write_arms(path, run=replace(FILTERED, rate=100.0))
    helped, *_ = answered(path)
    assert helped.answer == "Ahead at rate 100, in 3 seeds"
    write_arms(path, filtered=0.3, run=replace(FILTERED, rate=1000.0))
    helped, *_ = answered(path)
    assert helped.answer == "It depends"
    assert helped.lines[2].startswith("Rate 1,000: 50.0 → 30.0 %")


def test_many_comparisons_are_counted(path):
    for rate in (1.0, 2.0, 3.0, 4.0):
        write_arms(path, filtered=0.5 + 0.1 * rate, run=replace(FILTERED, rate=rate))
    helped, *_ = answered(path)
    assert helped.lines[0].startswith("Accuracy is clearly better in 4 of 4")
    assert helped.lines[1].startswith("Rate 4: 50.0 → 90.0 %")
    assert helped.lines[2].startswith("Rate 1: 50.0 → 60.0 %")


def test_one_seed_decides_nothing(path):
    helped, _, removed, _ = answered(write_arms(path, shifts=(0.0,)))
    assert helped.answer == "Not decided: too few seeds"
    assert helped.lines[0] == "50.0 → 70.0 % accuracy; one seed, no interval"
    assert removed.answer == "60 %"
    assert "one seed, no interval" in removed.lines[0]


def test_a_seed_that_diverged_is_no_gain(path):
    write_arms(path, shifts=(0.0, 0.01))
    for run in (replace(FILTERED, seed=2, rank=None), replace(FILTERED, seed=2)):
        accuracy = 0.5 if run.rank is None else None
        append_run(path, run_rows(run, accuracy))
    helped, *_ = answered(path)
    assert helped.answer == "Cannot be told yet"


def test_without_a_counterpart_nothing_is_told(path):
    append_run(path, run_rows(FILTERED, 0.5))
    helped, _, removed, _ = answered(path)
    assert (helped.answer, helped.is_known) == ("Cannot be told", False)
    assert removed.answer == "60 %"


def test_filters_that_differ_are_not_averaged(path):
    write_arms(path)
    write_arms(path, run=replace(FILTERED, rank=2), kept_norm=0.9, eigenvalues=[1, 0])
    *_, removed, directions = answered(path)
    assert removed.answer == "10 to 60 %"
    assert directions.answer == "It depends on how many are followed"
    assert directions.lines[1:] == [
        "filter, rank 2: 1 of 2",
        "filter, rank 4: 3 of 4",
    ]


def test_a_flat_spectrum_is_called_flat(path):
    *_, directions = answered(write_arms(path, eigenvalues=[1.0] * 4))
    assert directions.answer == "4 of 4"
    assert directions.lines[1].startswith("The spectrum is flat")


def test_a_spectrum_that_was_cut_off_is_not_counted(path):
    run = replace(FILTERED, rank=10)
    *_, directions = answered(write_arms(path, run=run))
    assert (directions.answer, directions.is_known) == ("Not measured", False)


def test_rows_of_another_loop_are_answered_as_far_as_they_go(tmp_path):
    rows = [{"step": s, "kept_norm": 0.5, "fraction": 0.9} for s in range(3)]
    helped, _, removed, directions = answered(write_loose(tmp_path / "own.jsonl", rows))
    assert not helped.is_known
    assert removed.answer == "50 %"
    assert not directions.is_known


def test_the_factor_in_bytes_of_a_recorded_run_is_told(path):
    steps = range(1, 31)
    rows = [
        {"step": s, "loss": 1.0 / s, "kept_norm": 0.4, "bytes_factor": 5.0 + 0.1 * s}
        for s in steps
    ]
    _, _, removed, _ = answered(write_loose(path, rows))
    # The last tenth of 30 steps: 7.8, 7.9 and 8.0.
    assert "An unbiased compressor may compress 7.9 times harder" in removed.lines[-1]


def test_without_the_column_no_factor_in_bytes_is_told(path):
    _, _, removed, _ = answered(write_arms(path))
    assert not any("unbiased" in line for line in removed.lines)
