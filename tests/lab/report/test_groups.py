from dataclasses import replace

import pytest
from made_rows import FILTERED, PLAIN, run_rows

from dome_lab.report.groups import groups_of, metrics_of
from dome_lab.report.sources import Section, Trial, known_trials


def section(*runs, made_by="train", **columns):
    found = {(made_by, run): run_rows(run, 0.5, **columns) for run in runs}
    return Section("test", "", known_trials(found))


def names(*runs):
    return [(g.setting, g.arm) for g in groups_of(section(*runs))]


def test_seeds_are_one_group_and_names_say_only_what_differs():
    both = [replace(run, seed=s) for run in (FILTERED, PLAIN) for s in range(3)]
    assert names(*both) == [("", "no filter"), ("", "filter, rank 4")]
    assert len(groups_of(section(*both))[0].trials) == 3


def test_settings_and_arms_are_named_apart():
    runs = [replace(FILTERED, rate=r) for r in (None, 10.0)]
    runs += [replace(FILTERED, rank=9, update_every=5), replace(PLAIN, rate=10.0)]
    assert names(*runs) == [
        ("no compression", "filter, rank 4"),
        ("no compression", "filter, rank 9, updated every 5 steps"),
        ("rate 10", "no filter"),
        ("rate 10", "filter, rank 4"),
    ]


def test_a_watched_run_is_a_plain_one():
    watched = replace(FILTERED, removes="nothing")
    assert names(watched, FILTERED) == [("", "no filter"), ("", "filter, rank 4")]
    both = [arm for _, arm in names(watched, PLAIN, FILTERED)]
    assert both[:2] == ["no filter", "no filter, watched at rank 4"]


def test_models_follow_from_tasks_and_are_not_named_then():
    other = replace(PLAIN, task="mnist", model="resnet18")
    assert [s for s, _ in names(PLAIN, other)] == ["digits", "mnist"]
    third = replace(PLAIN, model="resnet18")
    settings = [s for s, _ in names(PLAIN, other, third)]
    assert sorted(settings) == [
        "digits, resnet18",
        "digits, resnet8",
        "mnist, resnet18",
    ]


def test_several_rows_at_a_time_are_told_apart_by_words_then_by_numbers():
    rows = [
        {"epoch": e, "matrix": m, "num": n, "overlap": 0.1 * e * n}
        for e in (1, 2)
        for m in ("hessian", "gauss_newton")
        for n in (1, 2)
    ]
    trial = Trial({"rank": 3, "removes": "nothing"}, 0, rows, known=True)
    found = groups_of(Section("test", "", [trial]))
    assert {g.setting: g.lines["overlap"].mean for g in found} == {
        f"{matrix}, num {n}": pytest.approx([0.1 * n, 0.2 * n])
        for matrix in ("hessian", "gauss newton")
        for n in (1, 2)
    }


def test_drift_has_a_unit_only_where_it_is_known():
    (known,) = [
        m for m in metrics_of(groups_of(section(FILTERED))) if m.column == "drift"
    ]
    assert known.unit == "°"
    own = Trial({"run": "own"}, 0, [{"step": 1, "drift": 0.1}], known=False)
    (other,) = metrics_of(groups_of(Section("test", "", [own])))
    assert (other.title, other.unit) == ("Drift", "")


def test_time_is_told_only_where_it_is_known_what_it_is_of():
    (ours,) = groups_of(section(FILTERED))
    assert ours.seconds == 4.0
    own = Trial({"run": "own"}, 0, [{"step": 1, "seconds": 0.1}], known=False)
    (other,) = groups_of(Section("test", "", [own]))
    assert other.seconds == 0.0


def test_other_columns_of_numbers_have_pictures_too():
    trial = section(FILTERED).trials[0]
    rows = [row | {"noise_scale": row["epoch"], "same": 2.0} for row in trial.rows]
    metrics = metrics_of(groups_of(Section("test", "", [replace(trial, rows=rows)])))
    assert metrics[-1].title == "noise scale"  # and not what is the same all along
    assert [m.column for m in metrics[:2]] == ["test_accuracy", "train_loss"]
