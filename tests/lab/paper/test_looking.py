from dataclasses import replace

import pytest
import torch
from reference import gauss_newton, gradient_covariance, hessian
from torch import nn
from torch.nn.functional import cross_entropy

from dome_lab.paper import alignment, train
from dome_lab.paper.alignment import compute_alignment
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import Task
from dome_lab.paper.train import trained_model

RUN = Run(task="noise", model="linear", seed=1, epochs=2, batch_size=8, rank=9)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(44, 7, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (44,), generator=rng)
    task = Task("noise", x[:36], y[:36], x[36:], y[36:], num_classes=3)
    monkeypatch.setattr(train, "load_task", lambda name, **_: task)
    monkeypatch.setitem(train.TASKS, "noise", None)
    monkeypatch.setitem(train.MODELS, "linear", lambda _: nn.Linear(7, 3).double())
    return task


def leading(matrix, num):
    return torch.linalg.eigh(matrix).eigenvectors[:, -num:]


def overlap(V, W):
    return float((V.T @ W).square().sum() / min(V.shape[1], W.shape[1]))


@pytest.mark.parametrize("removes", ["span", "nothing"])
def test_overlaps_are_those_of_explicit_matrices_at_the_same_weights(
    removes, task, monkeypatch
):
    monkeypatch.setattr(alignment, "TOLERANCE", 1e-10)
    run = replace(RUN, removes=removes, lr=0.5)
    rows = list(compute_alignment(run))
    assert {row["epoch"] for row in rows} == {1, 2}
    model, _ = trained_model(run)
    samples = task.train_x, task.train_y
    twins = {"hessian": hessian, "gauss_newton": gauss_newton}
    covariance = leading(gradient_covariance(model, cross_entropy, *samples), 9)
    last = [row for row in rows if row["epoch"] == 2]
    assert len(last) == 8
    for row in last:
        assert row["step"] == 8
        assert row["chance"] == 9 / 24
        assert row["num_samples"] == 36
        if row["subspace"] == "covariance":
            exact = twins[row["matrix"]](model, cross_entropy, *samples)
            expected = overlap(covariance, leading(exact, row["num"]))
            # Eigenvectors are returned in float32.
            assert row["overlap"] == pytest.approx(expected, abs=1e-5)
        assert 0 < row["overlap"] <= 1 + 1e-6


def test_a_run_that_diverges_has_rows_without_numbers():
    rows = list(compute_alignment(replace(RUN, lr=1e308, momentum=0.9)))
    assert rows
    assert rows[-1]["overlap"] is None


def test_a_run_without_a_tracker_is_refused():
    with pytest.raises(ValueError, match="no basis: set a rank"):
        list(compute_alignment(replace(RUN, rank=None)))
