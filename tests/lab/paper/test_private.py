from dataclasses import replace

import pytest
import torch

from dome_lab.paper import private
from dome_lab.paper.private import compute_private
from dome_lab.paper.run import Run
from dome_lab.paper.tasks import load_task

pytestmark = pytest.mark.usefixtures("few_orders")
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
    public, _ = private._part(task, RUN, public=True)
    rest, _ = private._part(task, RUN, public=False)
    assert (len(public), len(rest)) == (10, 90)
    both = torch.cat([public, rest]).flatten(1)
    assert len(both.unique(dim=0)) == len(task.train_x.flatten(1).unique(dim=0))
    batches = private._public_batches(task, RUN)
    assert sum(len(x) for x, _ in batches) == 10


def test_without_public_samples_all_are_private():
    run = replace(RUN, public_every=0, basis=None, rank=None, epochs=1)
    (row,) = compute_private(run)
    assert row["num_private"] == 100
    with pytest.raises(ValueError, match="leaves no public samples"):
        replace(run, pretrain=1)
    with pytest.raises(ValueError, match="leaves no public samples"):
        replace(run, basis="public", rank=2)


def test_public_samples_are_learned_before_the_private_ones():
    run = replace(RUN, num_train=600, num_test=200, basis=None, rank=None, epochs=1)
    (untrained,) = compute_private(run)
    (pretrained,) = compute_private(replace(run, pretrain=20))
    # 60 images of digits teach far more than ten classes' chance of 0.1.
    assert untrained["accuracy_before"] < 0.3
    assert pretrained["accuracy_before"] > 0.5
    assert pretrained["spent"] == untrained["spent"]


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
