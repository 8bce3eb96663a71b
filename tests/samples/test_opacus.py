import importlib

import pytest
import samples.loop as twin
import torch
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import OpacusSamples, source_for

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def grad_sample():
    # When it is needed: importing it takes seconds.
    return importlib.import_module("opacus.grad_sample")


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("wrapper", ["GradSampleModule", "GradSampleHooks"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_opacus_rows_sum_to_the_gradient(wrapper, reduction, num_batches, grad_sample):
    wrap = getattr(grad_sample, wrapper)
    model, x = small(), torch.randn(2, 5, 3)
    rows = torch.cat([twin.per_sample_loop(model, [part]) for part in x[:num_batches]])
    hooked = wrap(model, loss_reduction=reduction)
    watched = hooked if wrap is grad_sample.GradSampleModule else model
    source = source_for("per_sample", watched, Layout(watched))
    assert isinstance(source, OpacusSamples)
    for part in x[:num_batches]:
        loss = twin.sum_loss(watched(part))
        (loss / 5 if reduction == "mean" else loss).backward()
    found = source.take()
    assert_close(found, rows / 5 if reduction == "mean" else rows)
    assert_close(found.sum(0), Layout(model).gather())
    assert source.take() is None


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_opacus_hooks_rest_while_unarmed(grad_sample):
    model = grad_sample.GradSampleModule(small())
    source = source_for("per_sample", model, Layout(model))
    source.arm(False)
    model(torch.randn(5, 3)).mean().backward()
    assert source.take() is None
    source.arm(True)
    model.zero_grad()
    model(torch.randn(5, 3)).mean().backward()
    assert len(source.take()) == 5


def test_a_parameter_may_be_a_single_number():
    model = nn.Linear(3, 1)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    for p in model.parameters():
        p.grad_sample = torch.randn(5, *p.shape)
        p.grad = p.grad_sample.sum(0)
    given = [p.grad_sample.reshape(5, -1) for p in model.parameters()]
    rows = OpacusSamples(model, Layout(model)).take()
    assert_close(rows, torch.cat(given, dim=1))
