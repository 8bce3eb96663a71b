from dataclasses import replace

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from dome.compression import GaussianSketch
from dome_lab.paper import arms, train
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import Task
from dome_lab.paper.train import compute_run, evaluate, trained_model, training

RUN = Run(task="noise", model="recorder", seed=1, epochs=2, batch_size=8)
MEASURED = {
    *("arm", "epoch", "train_loss", "test_loss", "test_accuracy", "test_macro_f1"),
    *("kept_norm", "fraction", "times_fewer_bits", "eigenvalues", "drift"),
    *("seconds", "processor_seconds"),
}
NUM_STEPS = 2 * (36 // 8)


class Recorder(nn.Module):
    """A linear model that keeps its first weights and every batch it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.first_weights = self.linear.weight.detach().clone()
        self.batches = []

    def forward(self, x):
        if self.training:
            self.batches.append(x.clone())
        return self.linear(x)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(44, 5, generator=rng), torch.randint(3, (44,), generator=rng)
    task = Task("noise", x[:36], y[:36], x[36:], y[36:], num_classes=3)
    monkeypatch.setattr(train, "load_task", lambda name, **_: task)
    monkeypatch.setitem(train.TASKS, "noise", None)
    monkeypatch.setitem(train.MODELS, "recorder", lambda _: Recorder())
    return task


def record(run, monkeypatch):
    models = []

    def make(_):
        models.append(Recorder())
        return models[-1]

    monkeypatch.setitem(train.MODELS, "recorder", make)
    return models[0] if list(compute_run(run)) else None


def rows_of(run):
    rows = list(compute_run(run))
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.parametrize("rank", [None, 2])
def test_yields_a_row_an_epoch_that_describes_its_run(rank):
    run = replace(RUN, rank=rank)
    rows = list(compute_run(run))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(row.keys() == run.columns().keys() | MEASURED for row in rows)
    assert all(row.items() >= run.columns().items() for row in rows)


@pytest.mark.parametrize("removes", ["nothing", "span", "rest", "uncoded", "hessian"])
def test_arms_share_initial_weights_and_sample_order(removes, monkeypatch):
    plain = record(replace(RUN, rate=3.0), monkeypatch)
    other = record(replace(RUN, rate=3.0, rank=2, removes=removes), monkeypatch)
    assert torch.equal(plain.first_weights, other.first_weights)
    # The Hessian's own samples, all of them at a time, are no steps.
    steps = [x for x in other.batches if len(x) == RUN.batch_size]
    assert len(plain.batches) == len(steps) == NUM_STEPS
    assert all(map(torch.equal, plain.batches, steps))


@pytest.mark.parametrize("removes", ["nothing", "span", "rest", "uncoded", "hessian"])
def test_arms_share_the_sketch_noise(removes, monkeypatch):
    drawn = []

    class Spy(GaussianSketch):
        def __init__(self, rate, *, generator):
            super().__init__(rate)
            self._spied = generator

        def __call__(self, vector):
            drawn.append(torch.randn(vector.shape, generator=self._spied))
            return vector

    monkeypatch.setattr(arms, "GaussianSketch", Spy)
    rows_of(replace(RUN, rate=3.0))
    rows_of(replace(RUN, rate=3.0, rank=2, removes=removes))
    assert len(drawn) == 2 * NUM_STEPS
    assert all(map(torch.equal, drawn[:NUM_STEPS], drawn[NUM_STEPS:]))


def test_a_run_repeats_itself_exactly():
    run = replace(RUN, rank=2, rate=3.0)
    assert rows_of(run) == rows_of(run)


def test_a_paced_run_trains_without_a_tracker_in_turn_and_changes_nothing(monkeypatch):
    run = replace(RUN, rank=2, rate=3.0)
    alone, paced = rows_of(run), rows_of(replace(run, paced=True))
    assert [row | {"paced": False} for row in paced] == alone
    order, original = [], train.Training.steps

    def told(training):
        for step in original(training):
            order.append((step.epoch, step.filter is not None))
            yield step

    monkeypatch.setattr(train.Training, "steps", told)
    rows = list(compute_run(replace(run, paced=True)))
    assert all(row["plain_seconds"] > 0 for row in rows)
    in_turn = [(1, True), (1, False), (2, True), (2, False)]
    assert order == [place for place in in_turn for _ in range(NUM_STEPS // 2)]


def test_seeds_differ():
    one, other = rows_of(RUN), rows_of(replace(RUN, seed=2))
    assert one[-1]["train_loss"] != other[-1]["train_loss"]


def test_optimizers_differ():
    one, other = rows_of(RUN), rows_of(replace(RUN, optimizer="adam"))
    third = rows_of(replace(RUN, momentum=0.9))
    assert len({rows[-1]["train_loss"] for rows in (one, other, third)}) == 3


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    rows_of(replace(RUN, rank=2, rate=3.0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_plain_training_learns_what_can_be_learned(task, monkeypatch):
    easy = replace(task, train_y=task.train_x[:, :3].argmax(dim=1))
    monkeypatch.setattr(train, "load_task", lambda name, **_: easy)
    rows = rows_of(replace(RUN, epochs=60))
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"]


def test_train_loss_is_the_mean_over_the_batches_of_the_epoch(monkeypatch):
    losses = []
    original = train.cross_entropy

    def recorded(output, y):
        loss = original(output, y)
        if loss.requires_grad:
            losses.append(loss.item())
        return loss

    monkeypatch.setattr(train, "cross_entropy", recorded)
    rows = rows_of(RUN)
    for row, mine in zip(rows, (losses[:4], losses[4:]), strict=True):
        assert row["train_loss"] == pytest.approx(sum(mine) / 4, abs=0)


def test_a_batch_larger_than_the_task_is_refused():
    with pytest.raises(ValueError, match="batch_size 64 is more than the 36"):
        rows_of(replace(RUN, batch_size=64))


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="no model 'resnet9', did you mean 'resnet"):
        rows_of(replace(RUN, model="resnet9"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rank": 2},
        {"rank": 2, "rate": 3.0},
        {"rank": 2, "rate": 3.0, "tracker": "svd"},
        {"rank": 2, "rate": 3.0, "removes": "rest"},
        {"rank": 2, "rate": 3.0, "removes": "uncoded"},
        {"rank": 2, "rate": 3.0, "removes": "hessian", "update_every": 3},
    ],
)
def test_a_run_that_diverges_goes_on_and_says_so(changes):
    run = replace(RUN, lr=3e38, epochs=3, momentum=0.9, **changes)
    rows = rows_of(run)
    assert len(rows) == 3
    assert rows[-1]["train_loss"] is None
    assert rows[-1]["test_loss"] is None
    assert 0 <= rows[-1]["test_accuracy"] <= 1
    assert rows[-1]["fraction"] is None


def test_trained_model_is_the_end_of_the_run(task):
    run = replace(RUN, rank=2)
    model, learned = trained_model(run)
    assert learned is task
    tested = evaluate(model, task.test_x, task.test_y)
    assert rows_of(run)[-1].items() >= tested.items()


@pytest.mark.parametrize("num_classes", [2, 5, 40])  # with 40, some never occur
def test_macro_f1_is_that_of_scikit_learn(num_classes, rng):
    y, other = torch.randint(num_classes, (2, 60), generator=rng)
    answers = torch.where(torch.rand(60, generator=rng) < 0.5, y, other)
    there = f1_score(y, answers, average="macro", zero_division=0)
    assert train.macro_f1(y, answers) == pytest.approx(there, rel=1e-12)


def test_macro_f1_is_the_mean_over_classes():
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    x = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    y = torch.tensor([0, 0, 1, 1])
    # Class 0: precision 2/3, recall 1. Class 1: precision 1, recall 1/2.
    tested = evaluate(model, x, y)
    assert tested["test_macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert tested["test_accuracy"] == 0.75


def test_a_run_can_be_looked_into_step_by_step(task):
    run = replace(RUN, rank=2)
    model, learned, steps = training(run)
    assert learned is task
    seen = [(step.number, step.epoch, step.filter.stats.step) for step in steps]
    assert seen == [(n, 1 + (n - 1) // 4, n) for n in range(1, NUM_STEPS + 1)]
    expected, _ = trained_model(run)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_progress_is_told_after_every_step():
    told = []
    list(compute_run(RUN, lambda *where: told.append(where)))
    assert told == [(e, s, 4) for e in (1, 2) for s in (1, 2, 3, 4)]
