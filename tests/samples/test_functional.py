import pytest
import samples.loop as twin
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample, per_sample_gradients

pytestmark = pytest.mark.usefixtures("float64")


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_functional_form_is_the_loop_and_leaves_no_trace():
    model, x, y = small(), torch.randn(5, 3), torch.randint(2, (5,))
    model[0].bias.requires_grad_(False)
    model(x).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    G = per_sample_gradients(model, F.cross_entropy, x, y)
    for i in range(5):
        one = slice(i, i + 1)
        (expected,) = twin.per_sample_loop(
            model, [x[one]], loss=lambda z, one=one: F.cross_entropy(z, y[one])
        )
        assert_close(G[i], expected)
    after = [p.grad for p in model.parameters()]
    assert_close(
        [g for g in after if g is not None], [g for g in before if g is not None]
    )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_functional_form_of_an_attached_model_leaves_its_rows_alone():
    model, x, y = small(), torch.randn(5, 3), torch.randint(2, (5,))
    source = PerSample(model, Layout(model))
    F.cross_entropy(model(x), y).backward()
    G = per_sample_gradients(model, F.cross_entropy, x[:3], y[:3])
    rows = source.take()
    assert_close(5 * rows[:3], G)
    per_sample_gradients(model, F.cross_entropy, x, y)
    assert source.take() is None


def test_functional_form_ignores_the_gradient_of_unused_layers():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = model["used"].forward
    model["unused"].weight.grad = torch.ones(2, 3)
    G = per_sample_gradients(model, F.mse_loss, torch.randn(4, 3), torch.randn(4, 2))
    assert_close(G[:, 8:], torch.zeros(4, 8))


def test_functional_form_of_a_loss_without_parameters_says_so():
    def constant(z, y):
        return z.detach().sum().requires_grad_()

    with pytest.raises(RuntimeError, match="does not depend"):
        per_sample_gradients(small(), constant, torch.randn(4, 3), torch.zeros(4))


def test_functional_form_of_a_loss_for_each_sample_says_so():
    def each(z, y):
        return F.mse_loss(z, y, reduction="none")

    with pytest.raises(ValueError, match=r"one number, got shape \(4, 2\)"):
        per_sample_gradients(small(), each, torch.randn(4, 3), torch.zeros(4, 2))
