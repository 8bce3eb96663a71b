from dataclasses import replace

import pytest
import torch

from dome_lab.paper import continual
from dome_lab.paper.continual import compute_continual, stages
from dome_lab.paper.run import Run
from dome_lab.paper.tasks import load_task

RUN = Run(
    task="digits",
    model="relu_mlp",
    seed=1,
    batch_size=20,
    epochs=1,
    num_train=200,
    num_test=100,
    stream="split",
)


@pytest.fixture
def task():
    return load_task("digits", num_train=200, num_test=100)


def test_split_tasks_are_pairs_of_classes(task):
    parts = stages(task, "split", seed=0)
    assert [part.classes.tolist() for part in parts] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
    ]
    assert sum(len(part.train_x) for part in parts) == len(task.train_x)
    for part in parts:
        assert set(part.train_y.tolist()) == set(part.test_y.tolist()) == {0, 1}
    fours = task.train_x[task.train_y == 4]
    assert torch.equal(parts[2].train_x[parts[2].train_y == 0], fours)


def test_permuted_tasks_have_the_same_pixels_in_another_order(task):
    parts = stages(task, "permuted", seed=0)
    assert torch.equal(parts[0].train_x, task.train_x)
    for part in parts[1:]:
        assert not torch.equal(part.train_x, task.train_x)
        for x, y in ((part.train_x, task.train_x), (part.test_x, task.test_x)):
            assert torch.equal(x.flatten(1).sort().values, y.flatten(1).sort().values)
    other = stages(task, "permuted", seed=1)
    assert not torch.equal(other[1].train_x, parts[1].train_x)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("penalty", [None, 10.0])
def test_a_row_a_task_with_the_accuracy_on_each(rank, penalty):
    rows = list(compute_continual(replace(RUN, rank=rank, penalty=penalty)))
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        scores = [row[f"accuracy_{i}"] for i in range(1, row["epoch"] + 1)]
        assert row["test_accuracy"] == pytest.approx(sum(scores) / len(scores))


@pytest.mark.parametrize("rank", [None, 2])
def test_a_penalty_changes_every_task_but_the_first(rank):
    without, with_it = (
        list(compute_continual(replace(RUN, rank=rank, penalty=penalty)))
        for penalty in (None, 100.0)
    )
    assert without[0]["train_loss"] == with_it[0]["train_loss"]
    assert without[1]["train_loss"] != with_it[1]["train_loss"]


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_run_that_diverges_goes_on_to_its_end(monkeypatch, value):
    def explode(model, *_):
        with torch.no_grad():
            next(model.parameters()).fill_(value)
        return value

    monkeypatch.setattr(continual, "_learn", explode)
    rows = list(compute_continual(replace(RUN, penalty=1.0)))
    assert len(rows) == 5
