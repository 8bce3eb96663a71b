import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dome
from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def gradient_penalty(model, x):
    """WGAN-GP."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def equation(model, x):
    """A physics-informed loss."""
    x = x.clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (bend.sum(1) + u[:, 0]).square().mean()


def unused_allowed(model, x):
    """Where torch is told that a missing derivative is a zero."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True, allow_unused=True)
    return 0 * model(x).sum() if bend is None else bend.square().mean()


def adapted(model, x):
    """MAML: the loss after a step of gradient descent."""
    grads = torch.autograd.grad(
        model(x).square().mean(), list(model.parameters()), create_graph=True
    )
    named = zip(model.named_parameters(), grads, strict=True)
    fast = {name: p - 0.1 * g for (name, p), g in named}
    return torch.func.functional_call(model, fast, (x,)).square().mean()


TERMS = [gradient_penalty, equation, unused_allowed, adapted]


@pytest.mark.parametrize("term", TERMS)
def test_a_second_derivative_of_captured_samples_is_an_error_of_domes(term):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dome.attach(model, optimizer, rank=2),
        pytest.raises(RuntimeError, match=r"dome captures first.*grad_filter\.paused"),
    ):
        term(model, torch.randn(5, 3)).backward()


@pytest.mark.parametrize("term", TERMS)
def test_paused_around_it_is_a_way_out(term):
    model, x = network(), torch.randn(5, 3)
    plain = copy.deepcopy(model)
    (plain(x).mean() + term(plain, x)).backward()
    source = PerSample(model, Layout(model))
    with source.paused():
        aside = term(model, x)
    (model(x).mean() + aside).backward()
    rows = source.take()
    source.detach()
    assert_close(Layout(model).gather(), Layout(plain).gather())
    own = copy.deepcopy(plain)
    own.zero_grad()
    own(x).mean().backward()
    assert_close(rows.sum(0), Layout(own).gather())


@pytest.mark.parametrize("term", TERMS)
def test_micro_batches_are_the_other(term):
    model, x = network(), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dome.attach(model, optimizer, rank=2, samples="microbatch") as grad_filter:
        for part in (x, 2 * x, -x):
            (model(part).mean() + term(model, part)).backward()
        optimizer.step()
    assert grad_filter.stats.effective_rank == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, for jvp
def test_derivatives_by_inputs_go_by_without_samples():
    model, x = network(), torch.randn(5, 3)
    expected = torch.func.jacrev(model)(x), torch.func.jvp(model, (x,), (x,))[1]
    source = PerSample(model, Layout(model))
    found = torch.func.jacrev(model)(x), torch.func.jvp(model, (x,), (x,))[1]
    assert_close(found, expected)
    assert_close(torch.autograd.functional.jacobian(model, x), expected[0])
    assert source.take() is None
    source.detach()


def test_several_gradients_at_once_are_an_error_of_domes():
    model, x = network(), torch.randn(5, 3)
    source = PerSample(model, Layout(model))
    out, ways = model(x), torch.eye(5)[..., None]
    with pytest.raises(RuntimeError, match="dome captures one gradient at a time"):
        torch.autograd.grad(out, list(model.parameters()), ways, is_grads_batched=True)
    source.detach()
