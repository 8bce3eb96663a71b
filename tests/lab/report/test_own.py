import csv
import json
import re

import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome_lab.report.answers import answers_of
from dome_lab.report.groups import groups_of, metrics_of
from dome_lab.report.page import html
from dome_lab.report.pairs import pairs_of
from dome_lab.report.sections import file_sections
from dome_lab.report.sources import as_shares, timed


def recorded(path, rng, *, filtered, num=6):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3) if filtered else None
    with dome.Recorder(path) as recorder:
        for step, (x, y) in enumerate(batches(rng, num), start=1):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            recorder.record(grad_filter, loss=loss, accuracy=0.1 * step, bytes=9 * step)


def answered(sections):
    (section,) = sections
    assert not section.notes
    groups = groups_of(section)
    return answers_of(groups, pairs_of(groups)), metrics_of(groups), groups


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_loop_of_ones_own_with_a_plain_arm_has_four_answers(tmp_path, rng, ending):
    paths = [tmp_path / f"{name}.{ending}" for name in ("plain", "filtered")]
    recorded(paths[0], rng, filtered=False)
    recorded(paths[1], rng, filtered=True)
    sections = file_sections(paths)
    answers, metrics, groups = answered(sections)
    assert all(answer.is_known for answer in answers)
    helped, cost, *_ = answers
    assert helped.answer == "Not decided: too few seeds"
    assert "do not tell whether either arm was tuned" in helped.caveat
    assert helped.lines[0] == "60.0 → 60.0 % accuracy; one seed, no interval"
    assert cost.answer.endswith("times the time")
    assert [metric.title for metric in metrics[:4]] == [
        "Test accuracy",
        "Training loss",
        "Test accuracy by seconds",
        "Test accuracy by bytes sent",
    ]
    assert not {"orthogonality error", "skipped updates"} & {m.title for m in metrics}
    (plain,) = (group for group in groups if group.is_plain)
    assert plain.lines["test_accuracy along bytes sent"].x == [9, 18, 27, 36, 45, 54]
    assert "plain" in html("title", sections)


def test_a_run_is_named_as_the_baseline_where_its_rows_do_not_say_so(tmp_path):
    for name, loss in (("one", 2.0), ("two", 1.0)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            seeds = [[1, seed, loss + seed / 9] for seed in range(3)]
            writer.writerows([["step", "seed", "loss"], *seeds])
    paths = [tmp_path / "one.csv", tmp_path / "two.csv"]
    (helped, *_), *_ = answered(file_sections(paths))
    assert helped.answer == "Cannot be told"
    (helped, *_), _, groups = answered(file_sections(paths, baseline="one"))
    assert [group.is_plain for group in groups] == [True, False]
    assert helped.answer != "Cannot be told"


def test_the_end_of_a_loop_is_the_mean_of_its_last_tenth(tmp_path):
    path = tmp_path / "run.csv"
    rows = [["step", "loss"], *[[step, float(step)] for step in range(1, 21)]]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    other = tmp_path / "plain.csv"
    other.write_text("step,loss\n1,7\n")
    _, _, groups = answered(file_sections([other, path], baseline="plain"))
    (pair,) = pairs_of(groups)
    assert (pair.loss_before, pair.loss_after) == (7.0, 19.5)


def test_seconds_are_those_of_the_run_also_where_it_was_resumed():
    rows = [{"elapsed": seconds} for seconds in (30.0, 31.0, 33.0, 0.5, 1.5)]
    assert [row["elapsed"] for row in timed(rows)] == [0.0, 1.0, 3.0, 3.5, 4.5]


def write_runs(folder, runs, columns="step,loss,accuracy,elapsed"):
    for name, rows in runs.items():
        lines = [",".join(map(str, row)) for row in rows]
        (folder / f"{name}.csv").write_text("\n".join([columns, *lines]) + "\n")
    return [folder]


def curve(pace, shift=0.0):
    """Ten rows: accuracy grows by a twentieth a row."""
    return [[i, 2 / i, 0.05 * i + shift, pace * i] for i in range(1, 11)]


def test_files_named_by_their_seeds_are_seeds_of_one_arm(tmp_path):
    runs = {f"plain-seed{seed}": curve(1.0, 0.01 * seed) for seed in range(3)}
    runs |= {f"dome_seed_{seed}": curve(2.0, 0.2 + 0.02 * seed) for seed in range(3)}
    sections = file_sections(write_runs(tmp_path, runs), baseline="plain")
    (helped, *_), _, groups = answered(sections)
    assert [(g.arm, [t.seed for t in g.trials]) for g in groups] == [
        ("plain", [0, 1, 2]),
        ("dome", [0, 1, 2]),
    ]
    assert helped.answer == "Ahead, in 3 seeds"


def test_a_number_in_a_name_is_a_seed_only_if_the_rows_say_so(tmp_path):
    columns = "step,loss,seed"
    runs = {"rank-1": [[1, 2.0, 0]], "rank-2": [[1, 1.0, 0]], "plain-7": [[1, 3.0, 7]]}
    sections = file_sections(write_runs(tmp_path, runs, columns), baseline="plain")
    _, _, groups = answered(sections)
    assert [(g.arm, g.trials[0].seed) for g in groups] == [
        ("plain", 7),
        ("rank-1", 0),
        ("rank-2", 0),
    ]


def test_a_baseline_that_is_no_run_is_refused_with_the_names(tmp_path):
    paths = write_runs(tmp_path, {"one": curve(1.0), "two": curve(2.0)})
    with pytest.raises(ValueError, match="--baseline takes one of one, two"):
        file_sections(paths, baseline="three")


def test_arms_are_also_compared_when_the_faster_one_has_ended(tmp_path):
    runs = {f"plain-seed{seed}": curve(1.0, 0.01 * seed) for seed in range(3)}
    runs |= {f"dome-seed{seed}": curve(2.5, 0.2 + 0.02 * seed) for seed in range(3)}
    sections = file_sections(write_runs(tmp_path, runs), baseline="plain")
    (helped, cost, *_), _, groups = answered(sections)
    assert helped.answer == "Ahead, in 3 seeds"
    assert helped.caveat.startswith("In as many seconds it is clearly ahead in 0 of 1.")
    assert cost.answer == "2.5 times the time"
    (pair,) = pairs_of(groups)
    # Ten rows without the filter take as long as four with it.
    assert pair.timed.before == pytest.approx(0.5 + 0.01)
    assert pair.timed.after == pytest.approx(0.2 + 0.2 + 0.02)
    assert "51.0 → 42.0 % accuracy, −9.0 [−11.5, −6.5] points" in cost.lines


def test_intervals_end_where_values_do_and_two_seeds_are_points(tmp_path):
    runs = {
        f"plain-seed{seed}": [[1, 1.0, value, 1.0]]
        for seed, value in enumerate((0.5, 0.9, 1.0))
    }
    runs |= {f"dome-seed{seed}": [[1, 1.0, 0.1 + 0.8 * seed, 1]] for seed in range(2)}
    sections = file_sections(write_runs(tmp_path, runs), baseline="plain")
    page = html("title", sections)
    (part,) = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    plain, dome_ = (group["lines"]["test_accuracy"] for group in part["groups"])
    assert plain["high"] == [100.0]
    assert 0 <= plain["low"][0] < 50
    assert "low" not in dome_
    assert dome_["seeds"] == [[10.0], [90.0]]
    assert "an interval needs 3" in page


def test_accuracy_in_per_cent_is_read_as_such(tmp_path):
    shares = curve(1.0)
    runs = {"plain": shares, "dome": [[s, x, 100 * a, t] for s, x, a, t in shares]}
    sections = file_sections(write_runs(tmp_path, runs), baseline="plain")
    (pair,) = pairs_of(groups_of(sections[0]))
    assert pair.before == pytest.approx(0.5)
    assert pair.after == pytest.approx(0.5)
    lost = [{"test_accuracy": 0.5}, {"test_accuracy": float("nan")}]
    assert as_shares(lost) == lost
