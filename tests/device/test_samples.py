import contextlib

import pytest
import torch
from device.agreement import assert_agree, moved
from samples.loop import sum_loss, tensors_in
from samples.models import built
from samples.rules.cases_indexing import INDEXING
from samples.rules.cases_layers import LAYERS
from samples.rules.cases_parameters import PARAMETERS
from samples.rules.cases_sequences import SEQUENCES, TIME_FIRST

import dome

CASES = {
    **{
        name: (make, 0)
        for name, make in {**LAYERS, **SEQUENCES, **PARAMETERS, **INDEXING}.items()
    },
    **{f"{name}, time first": (make, 1) for name, make in TIME_FIRST.items()},
}
# Their forward makes a tensor without saying where.
MAKES_TENSORS = (
    "expanded class token",
    "repeated class token",
    "assigned",
    "own recurrence from zeros",
    "last word by index",
    "words behind a mask",
    "experts into zeros",
)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def captured(model, inputs, batch_dim):
    """Output, gradient and samples of one backward pass."""
    with dome.sample_gradients(model, batch_dim=batch_dim) as samples:
        output = model(*inputs)
        sum_loss(output).backward()
        gradient = [p.grad for p in model.parameters() if p.grad is not None]
        rows = [samples.rows()]
    return {"output": tensors_in(output), "gradient": gradient, "samples": rows}


# Torch's own remark on even kernels, from the plain model.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_samples_of_every_rule_are_those_of_the_cpu(name, device):
    make, batch_dim = CASES[name]
    there, here, inputs = built(make)
    there = there.to(device.name)
    for module in there.modules():
        if hasattr(module, "options"):  # holds masks that are no buffers
            module.options = moved(module.options, device.name)
    expected = captured(here, inputs, batch_dim)
    lost = name in MAKES_TENSORS
    # Lengths of packed sequences stay on the host, whatever the device.
    there_inputs = moved(inputs, device.name)
    if name.startswith("packed"):
        there_inputs = [there_inputs[0], *inputs[1:]]
    with torch.device(device.name) if lost else contextlib.nullcontext():
        found = captured(there, there_inputs, batch_dim)
    assert len(expected["samples"]) == 1
    assert_agree(found, expected, torch.float64)


def test_the_functional_form_follows_its_model(device, rng):
    make, _ = CASES["conv2d"]
    there, here, (x,) = built(make)
    y = torch.randint(3, (len(x),), generator=rng)

    def loss(output, target):
        return (output.flatten(1).sum(1) - target).square().mean()

    expected = dome.per_sample_gradients(here, loss, x, y)
    found = dome.per_sample_gradients(
        there.to(device.name), loss, x.to(device.name), y.to(device.name)
    )
    assert found.device.type != "cpu"
    assert_agree(found, expected, torch.float32)
