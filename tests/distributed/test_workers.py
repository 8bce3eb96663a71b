import pytest
import torch
from checks import CHECKS, RUNS, flat, rng, run_options, sgd
from launch import assert_passed
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CHECKS)
def test_three_workers(name, workers):
    assert_passed(workers[0][3], name, 3)


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name, workers):
    assert_passed(workers[0][2], name, 2)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("suffix", "begin"), [(".pt", 4), (".2.pt", 6)])
def test_a_run_saved_on_workers_goes_on_in_one_process(name, suffix, begin, workers):
    # Saved by three workers, or by two that went on from there.
    saved = torch.load(workers[1] / f"{name}{suffix}", weights_only=True)
    model = small_classifier(seed=7)
    model.load_state_dict(saved["model"])
    optimizer = sgd(model)
    optimizer.load_state_dict(saved["optimizer"])
    options = run_options(name)
    if "compressor" in options:
        options["after"] = options.pop("compressor")
    parts = 1
    if name == "worker":
        options["samples"], parts = "microbatch", 3  # what three workers had
    grad_filter = dome.attach(model, optimizer, **options)
    grad_filter.load_state_dict(saved["filter"])
    for x, y in list(batches(rng(), 8))[begin:]:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (cross_entropy(model(x_part), y_part) / parts).backward()
        optimizer.step()
    assert grad_filter.stats.step == 8
    # Other numbers of workers compress, or take as samples, other gradients.
    if name != "compressed" and (name, begin) != ("worker", 6):
        tight = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(flat(model), saved["end"], **tight)
