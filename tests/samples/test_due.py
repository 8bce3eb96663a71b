import pytest
import torch
from torch import nn

import dome
from dome.parameters import Layout
from dome.samples import source_for

pytestmark = pytest.mark.usefixtures("float64")

KINDS = ["per_sample", "microbatch"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).tanh())

    def loss(self, x):
        return self(x).square().mean()


# Loops that never call model(...): what is filtered in them was random once.
UNSEEN = {
    "forward": lambda model, x: model.forward(x).square().mean(),
    "parts": lambda model, x: model.head(model.body(x).tanh()).square().mean(),
    "functional call of a part": lambda model, x: model.body(x).sum(),
}


@pytest.mark.parametrize("loss", UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_never_calls_the_model_is_an_error_at_the_first_step(kind, loss):
    model, x = Classifier(), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=2, samples=kind)
    loss(model, x).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError, match=r"not called as model\(...\)"):
        optimizer.step()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))


def test_a_method_that_calls_the_model_is_seen(model):
    model, x = Classifier(), torch.randn(5, 3)
    source = source_for("per_sample", model, Layout(model))
    model.loss(x).backward()
    assert len(source.take()) == 5


def test_the_ways_out_that_the_messages_name_work():
    model, x = Classifier(), torch.randn(5, 3)
    grad_filter = dome.GradientFilter(model, rank=2)
    with grad_filter.watch(x):
        loss = model.forward(x).square().mean()
    loss.backward()
    grad_filter.step()
    grad_filter.detach()
    model.zero_grad()
    grad_filter = dome.GradientFilter(model, rank=2, samples="microbatch")
    for part in (x[:2], x[2:]):
        loss = model.forward(part).square().mean()
        grad_filter.expect_backward(loss)
        loss.backward()
    grad_filter.step()
    assert grad_filter.stats.skipped_updates == 0


@pytest.fixture(params=KINDS)
def source_of(request):
    return lambda model: source_for(request.param, model, Layout(model))


def unseen_backward(model):
    model.forward(torch.randn(5, 3)).sum().backward()


def test_no_gradient_and_gradients_of_zeros_need_no_samples(model, source_of):
    source = source_of(model)
    assert source.take() is None
    unseen_backward(model)
    model.zero_grad(set_to_none=False)
    assert source.take() is None


def test_evaluation_needs_no_samples(model, source_of):
    source = source_of(model)
    with torch.no_grad():
        model(torch.randn(5, 3))
    model(torch.randn(5, 3))
    assert source.take() is None


def test_gradients_from_before_attaching_need_no_samples(model, source_of):
    unseen_backward(model)
    assert source_of(model).take() is None


def test_a_step_without_another_backward_needs_no_samples(model, source_of):
    source = source_of(model)
    model(torch.randn(5, 3)).sum().backward()
    assert source.take() is not None
    model[0].weight.grad.mul_(0.5)  # what the filter does
    source.arm(True)
    assert source.take() is None
    source.discard()
    assert source.take() is None
    unseen_backward(model)
    with pytest.raises(RuntimeError, match=r"although .grad was filled"):
        source.take()


def test_a_source_that_rests_needs_no_samples(model, source_of):
    source = source_of(model)
    source.arm(False)
    unseen_backward(model)
    assert source.take() is None


def test_samples_that_came_another_way_are_not_missed(model, source_of):
    source = source_of(model)
    unseen_backward(model)
    assert source.take(due=False) is None


def test_gradients_set_by_hand_after_autograd_grad_are_an_error(model, source_of):
    source, parameters = source_of(model), list(model.parameters())
    loss = model(torch.randn(5, 3)).sum()
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    with pytest.raises(RuntimeError, match=r"set by hand|although .grad was filled"):
        source.take()


def test_an_error_names_the_parameter_if_the_model_was_called(model):
    source = source_for("per_sample", model, Layout(model))
    model(torch.randn(5, 3))
    unseen_backward(model)
    with pytest.raises(RuntimeError, match=r"'0.weight'.*no captured sample"):
        source.take()


def test_a_step_that_is_paused_as_a_whole_needs_no_samples(model, source_of):
    source = source_of(model)
    for _ in range(2):
        with source.paused():
            model(torch.randn(7, 3)).square().sum().backward()
        assert source.take() is None
        source.arm(True)
    unseen_backward(model)
    with pytest.raises(RuntimeError, match=r"(seen|captured) for this step"):
        source.take()


def test_forwards_that_are_paused_leave_no_samples(model, source_of):
    source = source_of(model)
    x = torch.randn(5, 3)
    with source.paused():
        aside = model(torch.randn(7, 3)).square().sum()
    (model(x).sum() + aside).backward()
    rows = source.take()
    assert len(rows) in (1, 5)  # micro-batches, samples
