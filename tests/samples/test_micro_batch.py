import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import MicroBatch


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def plain_gradient(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("make", [small, normed])
def test_microbatch_rows_are_what_each_backward_adds(make):
    model, batches = make(), torch.randn(3, 5, 3)
    expected = [plain_gradient(model, model(x).square().mean()) for x in batches]
    source = MicroBatch(model, Layout(model))
    for x in batches:
        model(x).square().mean().backward()
    rows = source.take()
    assert_close(rows, torch.stack(expected))
    assert_close(rows.sum(0), Layout(model).gather())
    assert source.take() is None


def test_microbatch_of_a_penalised_loss_includes_the_penalty():
    model, batches = small(), torch.randn(2, 5, 3)

    def loss(x):
        penalty = sum(p.square().sum() for p in model.parameters())
        return model(x).square().mean() + penalty

    expected = [plain_gradient(model, loss(x)) for x in batches]
    source = MicroBatch(model, Layout(model))
    loss(batches[0]).backward()
    assert_close(source.take(), expected[0][None])
    model.zero_grad()
    for x in batches:
        loss(x).backward()
    assert_close(source.take().sum(0), expected[0] + expected[1])


def test_microbatch_drops_rows_of_a_gradient_that_was_zeroed():
    model = small()
    source = MicroBatch(model, Layout(model))
    model(torch.randn(5, 3)).sum().backward()
    model.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    loss = model(torch.randn(5, 3)).sum()
    assert len(source.take()) == 1
    model.zero_grad()
    loss.backward()
    assert len(source.take()) == 1


def test_microbatch_takes_one_row_of_two_forwards_before_one_backward():
    model = small()
    source = MicroBatch(model, Layout(model))
    (model(torch.randn(5, 3)).sum() + model(torch.randn(2, 3)).sum()).backward()
    rows = source.take()
    assert_close(rows, Layout(model).gather()[None])


def test_microbatch_ignores_unarmed_evaluation_and_autograd_grad():
    model = small()
    source = MicroBatch(model, Layout(model))
    source.arm(False)
    model(torch.randn(5, 3)).sum().backward()
    source.arm(True)
    model.zero_grad()
    with torch.no_grad():
        model(torch.randn(5, 3))
    torch.autograd.grad(model(torch.randn(5, 3)).sum(), list(model.parameters()))
    assert source.take() is None
    source.detach()
    assert not model._forward_hooks


def test_microbatch_works_with_compiled_models():
    model = small()
    compiled = torch.compile(model, backend="eager")
    source = MicroBatch(compiled, Layout(compiled))
    for _ in range(2):
        compiled(torch.randn(5, 3)).sum().backward()
    rows = source.take()
    assert_close(rows.sum(0), Layout(model).gather())
    assert len(rows) == 2


def test_microbatch_works_with_a_model_compiled_in_place():
    model = small()
    model.compile(backend="eager")
    source = MicroBatch(model, Layout(model))
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
    rows = source.take()
    assert_close(rows.sum(0), Layout(model).gather())
    assert len(rows) == 2
