import copy
import gc
import pickle
import weakref

import pytest
import torch
from samples.loop import per_sample_loop, sum_loss
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")


def backward(model, x):
    sum_loss(model(x)).backward()


def test_a_graph_that_is_dropped_is_freed(model, source):
    output = model(torch.randn(4, 3))
    sources = [weakref.ref(output), weakref.ref(output.grad_fn)]
    del output
    gc.collect()
    assert [ref() for ref in sources] == [None, None]


def test_input_gradients_are_plain(model, source):
    x = torch.randn(4, 3, requires_grad=True)
    backward(model, x)
    found = x.grad.clone()
    source.detach()
    assert_close(found, torch.autograd.grad(sum_loss(model(x)), x)[0])


def test_gradients_asked_of_autograd_grad_are_not_rows(model, source):
    x = torch.randn(4, 3, requires_grad=True)
    loss = sum_loss(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x.detach()]))


def test_backward_into_chosen_inputs_captures_those_alone(model, source):
    sum_loss(model(torch.randn(4, 3))).backward(inputs=[model[2].weight])
    rows = source.take()
    assert rows[:, 16:24].abs().sum() > 0
    assert rows[:, :16].abs().sum() == rows[:, 24:].abs().sum() == 0


def penalty(critic, x):
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(2, 1) - 1).square().sum()


@pytest.mark.parametrize("depth", [1, 3], ids=["linear", "deep"])
def test_second_derivatives_are_refused_by_name(model, depth):
    critic = model[-depth:]
    source = PerSample(critic, Layout(critic))
    x = torch.randn(4, critic[0].in_features, requires_grad=True)
    loss = critic(x).sum() + penalty(critic, x)
    with pytest.raises(RuntimeError, match=r"dome .*paused\(\).*microbatch"):
        loss.backward()
    source.detach()


def test_a_paused_penalty_is_in_the_gradient_and_not_in_the_rows(model, source):
    x = torch.randn(4, 3, requires_grad=True)
    with source.paused():
        extra = penalty(model, x)
    (sum_loss(model(x)) + extra).backward()
    rows, total = source.take(), Layout(model).gather()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x.detach()]))
    model.zero_grad()
    penalty(model, x).backward()
    assert_close(rows.sum(0) + Layout(model).gather(), total)


def test_penalty_on_parameters_goes_to_the_gradient_and_not_to_the_rows(model, source):
    x = torch.randn(4, 3)
    penalty = sum(p.square().sum() for p in model.parameters())
    (sum_loss(model(x)) + penalty).backward()
    rows = source.take()
    total = Layout(model).gather()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close(rows.sum(0) + 2 * weights, total)


def test_an_error_in_forward_leaves_no_mode_behind(model, source):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 5))
    assert torch._C._len_torch_function_stack() == 0
    x = torch.randn(4, 3)
    backward(model, x)
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_detach_leaves_the_model_as_it_was(model):
    before = pickle.dumps(model)
    source = PerSample(model, Layout(model))
    backward(model, torch.randn(4, 3))
    source.take()
    source.detach()
    model.zero_grad()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks_always_called
    assert not model._forward_pre_hooks_with_kwargs
    assert all(not p.__dict__ for p in model.parameters())
    assert torch._C._len_torch_function_stack() == 0
    assert pickle.dumps(model) == before


def test_copies_of_an_attached_model_are_plain(model, source):
    x = torch.randn(4, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        backward(twin, x)
        assert source.take() is None
    backward(model, x)
    assert_close(
        [p.grad for p in twin.parameters()], [p.grad for p in model.parameters()]
    )
    assert len(source.take()) == 4


def test_nothing_is_hung_on_parameters_and_state_dict_is_plain(model, source):
    names = list(model.state_dict())
    backward(model, torch.randn(4, 3))
    assert list(model.state_dict()) == names
    assert all(not p.__dict__ for p in model.parameters())


def test_dropout_draws_what_a_plain_forward_draws():
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(), nn.LSTM(6, 5, 2, dropout=0.5, batch_first=True)
    )
    x = torch.randn(4, 3, 6)
    torch.manual_seed(7)
    expected = model(x)[0]
    source = PerSample(model, Layout(model))
    torch.manual_seed(7)
    found = model(x)[0]
    source.detach()
    assert_close(found, expected)


def test_only_the_parameters_of_the_layout_are_captured(model):
    layout = Layout(model, only=model[2].parameters())
    source = PerSample(model, layout)
    x = torch.randn(4, 3)
    backward(model, x)
    rows, grads = source.take(), [p.grad.clone() for p in model.parameters()]
    source.detach()
    assert_close(rows, per_sample_loop(model, [x])[:, 16:])
    model.zero_grad()
    backward(model, x)
    assert_close(grads, [p.grad for p in model.parameters()])


def test_gradient_clipping_and_weight_hooks_work_as_usual(model, source):
    model[0].weight.register_hook(lambda g: 2 * g)
    x = torch.randn(4, 3)
    backward(model, x)
    assert_close(model[0].weight.grad.flatten(), 2 * source.take()[:, :12].sum(0))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def test_functional_transforms_of_an_attached_model_are_plain(model, source):
    x = torch.randn(4, 3)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return sum_loss(torch.func.functional_call(model, weights, (x[None],)))

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    found = torch.cat([g.flatten(1) for g in grads.values()], 1)
    source.detach()
    assert_close(found, per_sample_loop(model, [x]))
    assert source.take() is None
