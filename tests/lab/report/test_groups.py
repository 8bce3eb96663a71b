from dataclasses import replace

import pytest
from made_rows import FILTERED, PLAIN, run_rows

from dome_lab.paper.rows import append_run
from dome_lab.report.groups import RELATIVE, groups_of, metrics_of
from dome_lab.report.sources import Section, Trial, known_trials, read_source


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
    (trial,) = section(FILTERED).trials
    turning = replace(trial, rows=[row | {"drift": row["epoch"]} for row in trial.rows])
    metrics = metrics_of(groups_of(Section("test", "", [turning])))
    (known,) = [m for m in metrics if m.column == "drift"]
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
    assert metrics[-1].title == "Noise scale"  # and not what is the same all along
    assert [m.column for m in metrics[:2]] == ["test_accuracy", "train_loss"]


def test_what_does_not_change_in_any_run_has_no_picture():
    trials = section(FILTERED, replace(FILTERED, rate=100.0)).trials
    told = [
        replace(
            t, rows=[r | {"lr": 0.1 * (i + 1), "growing": r["epoch"]} for r in t.rows]
        )
        for i, t in enumerate(trials)
    ]
    columns = [m.column for m in metrics_of(groups_of(Section("test", "", told)))]
    assert "growing" in columns
    assert not {"lr", "fraction", "drift"} & set(columns)


def test_macro_f1_has_a_picture_only_where_it_is_not_the_accuracy():
    (trial,) = section(FILTERED).trials
    for f1, is_shown in ((0.69, False), (0.5, True)):
        rows = [r | {"test_accuracy": 0.7, "test_macro_f1": f1} for r in trial.rows]
        rows[0]["test_macro_f1"] = 0.1  # else it does not change
        groups = groups_of(Section("test", "", [replace(trial, rows=rows)]))
        shown = {m.column for m in metrics_of(groups)}
        assert ("test_macro_f1" in shown) == is_shown


def test_our_runs_are_compared_along_seconds_and_bytes(tmp_path):
    for run, pace in ((FILTERED, 2.0), (replace(FILTERED, rank=None), 1.0)):
        for rate, fewer in ((None, None), (100.0, 50.0)):
            rows = run_rows(replace(run, rate=rate), 0.5, processor_seconds=pace)
            rows = [row | {"times_fewer_bits": fewer} for row in rows]
            append_run(tmp_path / "rows.jsonl", rows)
    groups = groups_of(read_source(tmp_path / "rows.jsonl"))
    along = {m.along for m in metrics_of(groups)}
    assert {"seconds", RELATIVE} <= along
    for group in groups:
        pace = 1.0 if group.is_plain else 2.0
        steps = 1.0 if group.settings["rate"] is None else 1 / 50
        lines = group.lines
        assert lines["test_accuracy along seconds"].x == [pace * i for i in range(1, 5)]
        assert lines[f"test_accuracy along {RELATIVE}"].x == pytest.approx(
            [steps * i for i in range(1, 5)]
        )


def test_signal_and_noise_of_the_filter_are_drawn_as_their_ratio():
    names = ("signal", "noise", "signal_to_noise")
    for told, drawn in ((names, ["signal_to_noise"]), (names[:2], ["noise", "signal"])):
        rows = [{"step": i} | dict.fromkeys(told, 0.1 * i) for i in (1, 2)]
        own = Trial({"run": "own"}, 0, rows, known=False)
        metrics = metrics_of(groups_of(Section("test", "", [own])))
        assert [m.column for m in metrics] == drawn
