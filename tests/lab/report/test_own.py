import csv

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
from dome_lab.report.sources import timed


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
