import pytest
import samples.loop as twin
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleHooks
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import (
    MicroBatch,
    OpacusSamples,
    PerSample,
    per_sample_gradients,
    source_for,
)

pytestmark = pytest.mark.usefixtures("float64")


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


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("wrap", [GradSampleModule, GradSampleHooks])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_opacus_rows_sum_to_the_gradient(wrap, reduction, num_batches):
    model, x = small(), torch.randn(2, 5, 3)
    rows = torch.cat([twin.per_sample_loop(model, [part]) for part in x[:num_batches]])
    hooked = wrap(model, loss_reduction=reduction)
    watched = hooked if wrap is GradSampleModule else model
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
def test_opacus_hooks_rest_while_unarmed():
    model = GradSampleModule(small())
    source = source_for("per_sample", model, Layout(model))
    source.arm(False)
    model(torch.randn(5, 3)).mean().backward()
    assert source.take() is None
    source.arm(True)
    model.zero_grad()
    model(torch.randn(5, 3)).mean().backward()
    assert len(source.take()) == 5


def test_sources_are_found_by_name():
    model = small()
    assert isinstance(source_for("microbatch", model, Layout(model)), MicroBatch)
    assert isinstance(source_for("per_sample", model, Layout(model)), PerSample)


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
