import pytest
import torch
import torch.nn.functional as F
from samples.loop import sum_loss
from samples.models import B, Then, vector
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.rules import RULES, recording

pytestmark = pytest.mark.usefixtures("float64")


# What goes from one sample on to the next is not what one sample alone is given.
REFUSED = {
    "kron": lambda: (
        Then(lambda m, x: torch.kron(x, m.w), w=vector(2, 1)),
        [torch.randn(B, 3)],
    ),
    "kron of zeros": lambda: (
        Then(lambda m, x: torch.kron(x, m.w), w=nn.Parameter(torch.zeros(2, 1))),
        [torch.randn(B, 3)],
    ),
    "cartesian_prod": lambda: (
        Then(lambda m, x: torch.cartesian_prod(x, m.w), w=vector(3)),
        [torch.randn(B)],
    ),
}


@pytest.mark.parametrize(("name", "make"), REFUSED.items(), ids=REFUSED.keys())
def test_an_operation_that_is_another_on_one_sample_is_refused_by_name(name, make):
    model, inputs = make()
    source = PerSample(model, Layout(model))
    with pytest.raises(
        RuntimeError, match=rf"'{name.split()[0]}'.*other values.*1e-08.*microb"
    ):
        model(*inputs)
    source.detach()


def test_an_operation_whose_gradient_is_another_under_vmap_is_refused_by_name():
    # That of torch 2.13: six times the gradient. Its values are right.
    def run(m, x):
        return torch.select_scatter(x, m.w.expand(len(x)), 1, 1)

    def vmap_is_wrong():
        x, w = torch.randn(2, 6), torch.randn(2, 1, requires_grad=True)
        one = torch.vmap(lambda r, s: torch.select_scatter(r[None], s, 1, 1)[0])
        (slope,) = torch.autograd.grad(one(x, w).sum(), w)
        return not torch.equal(slope, torch.ones(2, 1))

    model = Then(run, w=vector(1))
    source = PerSample(model, Layout(model))
    if vmap_is_wrong():
        with pytest.raises(RuntimeError, match=r"'select_scatter'.*other gradients"):
            model(torch.randn(B, 6))
    else:
        sum_loss(model(torch.randn(B, 6))).backward()
        assert_close(source.take().sum(0), model.w.grad)
    source.detach()


@pytest.fixture
def wrong(monkeypatch):
    """A rule for ``hypot`` that turns wrong."""

    @recording.recording
    def rule(trace, call, x, w):
        return x * w if rule.wrong else call.func(x, w)

    rule.wrong = False
    monkeypatch.setitem(RULES, torch.hypot, rule)
    return rule


def test_a_rule_that_is_wrong_changes_no_value(wrong, monkeypatch):
    monkeypatch.setattr(recording, "compare", lambda *_: None)
    wrong.wrong = True
    model, x = Then(lambda m, x: torch.hypot(x, m.w), w=vector(3)), torch.randn(B, 3)
    plain = model(x)
    source = PerSample(model, Layout(model))
    assert torch.equal(model(x), plain)
    source.detach()


def test_a_rule_is_compared_at_new_shapes_and_now_and_then(wrong, monkeypatch):
    monkeypatch.setattr(recording, "EVERY", 3)
    model = Then(lambda m, x: torch.hypot(x, m.w), w=vector(3))
    source, x = PerSample(model, Layout(model)), torch.randn(B, 3)
    model(x)
    wrong.wrong = True
    for _ in range(2):
        model(x)
    with pytest.raises(RuntimeError, match=r"'hypot'.*other values"):
        model(x)
    with pytest.raises(RuntimeError, match=r"'hypot'.*other values"):
        model(torch.randn(B, 5, 3))
    source.detach()


def test_what_is_drawn_inside_is_drawn_again_for_the_gradient():
    model = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    x = torch.randn(B, 5, 3)

    def gradient():
        torch.manual_seed(1)
        model.zero_grad()
        sum_loss(model(x)[0]).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradient()
    source = PerSample(model, Layout(model))
    found = gradient()
    assert_close(found, plain)
    rows = source.take()
    source.detach()
    assert_close(rows.sum(0), torch.cat([g.flatten() for g in plain]))


def test_what_is_drawn_inside_is_drawn_again_under_checkpointing():
    x, found = torch.randn(B, 5, 3), []
    model = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    plain = model.forward
    for forward in (plain, lambda x: checkpoint(plain, x, use_reentrant=False)):
        model.forward = forward
        source = PerSample(model, Layout(model))
        torch.manual_seed(1)
        sum_loss(model(x)[0]).backward()
        found.append(source.take())
        source.detach()
    assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_value_of_a_rule_may_be_written_to():
    model = Then(lambda m, x: F.prelu(x, m.w).mul_(2.0).tanh_(), w=vector(3))
    x = torch.randn(B, 3)
    plain = model(x)
    sum_loss(plain).backward()
    expected = model.w.grad.clone()
    source = PerSample(model, Layout(model))
    model.zero_grad()
    output = model(x)
    sum_loss(output).backward()
    source.detach()
    assert torch.equal(output, plain)
    assert_close(model.w.grad, expected)


def test_coarser_products_are_no_other_values():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = Then(lambda m, x: m.w @ x, w=vector(64, 64)).float()
        source = PerSample(model, Layout(model))
        model(torch.randn(B, 64, 8, dtype=torch.float32))
        source.detach()
    finally:
        torch.set_float32_matmul_precision(before)
