from dataclasses import replace

import pytest
import torch

from dome_lab.paper import private
from dome_lab.paper.private import compute_private
from dome_lab.paper.run import Run
from dome_lab.paper.tasks import load_task

RUN = Run(
    task="digits",
    model="tanh_cnn",
    seed=1,
    batch_size=20,
    epochs=2,
    num_train=100,
    num_test=50,
    rank=2,
    epsilon=4.0,
    basis="released",
    max_grad_norm=0.1,
)


def test_public_and_private_samples_are_apart_and_all_of_them():
    task = load_task("digits", num_train=100, num_test=50)
    public, _ = private._part(task, public=True)
    rest, _ = private._part(task, public=False)
    assert (len(public), len(rest)) == (10, 90)
    both = torch.cat([public, rest]).flatten(1)
    assert len(both.unique(dim=0)) == len(task.train_x.flatten(1).unique(dim=0))
    batches = private._public_batches(task, seed=0)
    assert sum(len(x) for x, _ in batches) == 10


@pytest.mark.parametrize("basis", [None, "public", "released", "private"])
def test_a_run_spends_its_epsilon_and_no_more(basis):
    rank = None if basis is None else 2
    rows = list(compute_private(replace(RUN, basis=basis, rank=rank)))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert 0 < rows[0]["spent"] < rows[1]["spent"] <= 4.0
    assert rows[1]["spent"] > 3.9
    assert rows[0]["num_private"] == 90


def test_a_seed_gives_the_same_rows_again():
    first, second = (
        [row | {"seconds": 0} for row in compute_private(RUN)] for _ in range(2)
    )
    assert first == second


def test_a_run_without_an_epsilon_is_refused():
    with pytest.raises(ValueError, match="has epsilon and max_grad_norm"):
        list(compute_private(replace(RUN, epsilon=None)))
