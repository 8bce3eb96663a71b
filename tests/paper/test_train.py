from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from dome.paper.tasks.task import Task
from dome.paper.train import Run, train

RUN = Run(seed=1, rank=None, rate=None, epochs=2, batch_size=8)
ROW_COLUMNS = {
    *("seed", "arm", "rate", "epoch", "train_loss", "test_accuracy", "test_loss"),
    *("kept_norm", "fraction", "seconds"),
}
SGD = partial(torch.optim.SGD, lr=0.1)


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


@pytest.fixture
def task():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(44, 5, generator=rng), torch.randint(3, (44,), generator=rng)
    return Task("noise", x[:36], y[:36], x[36:], y[36:], num_classes=3)


def record(task, run):
    models = []

    def make_model():
        models.append(Recorder())
        return models[-1]

    rows = list(train(task, make_model, SGD, run))
    return models[0], rows


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("rank", [None, 2])
def test_yields_a_flat_row_an_epoch(task, rank):
    _, rows = record(task, replace(RUN, rank=rank))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(row.keys() == ROW_COLUMNS for row in rows)


def test_both_arms_share_initial_weights_and_sample_order(task):
    plain, _ = record(task, replace(RUN, rate=3.0))
    filtered, _ = record(task, replace(RUN, rate=3.0, rank=2))
    assert torch.equal(plain.first_weights, filtered.first_weights)
    assert len(plain.batches) == len(filtered.batches) == 2 * (36 // 8)
    assert all(map(torch.equal, plain.batches, filtered.batches))


def test_both_arms_share_the_sketch_noise(task, monkeypatch):
    drawn = []

    def spy(rate, *, generator):
        def sketch(vector):
            drawn.append(torch.randn(vector.shape, generator=generator))
            return vector

        return sketch

    monkeypatch.setattr("dome.paper.train.GaussianSketch", spy)
    record(task, replace(RUN, rate=3.0))
    record(task, replace(RUN, rate=3.0, rank=2))
    num_steps = 2 * (36 // 8)
    assert len(drawn) == 2 * num_steps
    assert all(map(torch.equal, drawn[:num_steps], drawn[num_steps:]))


def test_runs_without_filter_remove_nothing(task):
    _, rows = record(task, RUN)
    assert all(row["kept_norm"] == 1 and row["fraction"] is None for row in rows)


def test_filter_of_full_rank_leaves_nothing(task):
    _, rows = record(task, replace(RUN, rank=18))
    # From the third update on the samples have spanned all 18 directions.
    assert rows[-1]["kept_norm"] < 1e-3


def test_a_run_repeats_itself_exactly(task):
    run = replace(RUN, rank=2, rate=3.0)
    first, second = record(task, run)[1], record(task, run)[1]
    assert without_seconds(first) == without_seconds(second)


def test_seeds_differ(task):
    one, other = record(task, RUN)[1], record(task, replace(RUN, seed=2))[1]
    assert one[-1]["train_loss"] != other[-1]["train_loss"]


def test_compression_changes_the_steps(task):
    one, other = record(task, RUN)[1], record(task, replace(RUN, rate=9.0))[1]
    assert one[-1]["train_loss"] != other[-1]["train_loss"]


def test_the_global_generator_is_left_alone(task):
    before = torch.random.get_rng_state()
    record(task, replace(RUN, rank=2, rate=3.0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_plain_training_learns_what_can_be_learned(task):
    easy = replace(task, train_y=task.train_x[:, :3].argmax(dim=1))
    _, rows = record(easy, replace(RUN, epochs=60))
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"]


def test_a_batch_larger_than_the_task_is_refused(task):
    with pytest.raises(ValueError, match="batch_size 64 is more than the 36"):
        record(task, replace(RUN, batch_size=64))
