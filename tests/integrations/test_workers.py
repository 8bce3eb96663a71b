"""Two real processes: each trainer against the plain loop in one process."""

from pathlib import Path

import pytest
import test_transformers
import torch
from distributed.launch import run_as_torchrun
from loops import digits_like, plain

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    ((outputs, _),) = run_as_torchrun((2, folder, HERE / "workers.py", folder))
    return folder, "\n".join(outputs)[-4000:]


def both(trained, name):
    folder, said = trained
    path = folder / f"{name}.pt"
    assert path.exists(), said
    first, second = torch.load(path, weights_only=True)
    assert torch.equal(first, second)
    return first


def batches():
    x, y = digits_like(48)
    return 2 * list(zip(x.split(12), y.split(12), strict=True))


TIGHT = {"rtol": 1e-9, "atol": 1e-9}  # sums in another order, eight steps


def test_lightning(trained):
    expected, grad_filter = plain(batches(), accumulate=2)
    torch.testing.assert_close(both(trained, "with_lightning"), expected, **TIGHT)
    saved = torch.load(trained[0] / "lightning.ckpt", weights_only=True)
    (state,) = (
        value["filter"] for key, value in saved["callbacks"].items() if "Dome" in key
    )
    assert state["num_steps"] == grad_filter.stats.step == 4
    assert state["blocks.all.basis"].shape == grad_filter.trackers["all"].basis.shape


@pytest.mark.parametrize("name", ["with_lightning", "with_transformers"])
def test_a_resumed_run_goes_on_bit_for_bit(trained, name):
    assert torch.equal(both(trained, f"{name}_resumed"), both(trained, name))


def test_accelerate(trained):
    expected, _ = plain(batches())
    torch.testing.assert_close(both(trained, "with_accelerate"), expected, **TIGHT)


def test_transformers_trainer(trained):
    rows = test_transformers.sentences()
    expected, _ = test_transformers.plain(
        test_transformers.bert(), test_transformers.one_by_one(rows), rank=2
    )
    torch.testing.assert_close(both(trained, "with_transformers"), expected, **TIGHT)
