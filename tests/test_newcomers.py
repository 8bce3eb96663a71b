import gc
import weakref

import pytest
import torch
from models import batches, small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome


def backward(model, rng):
    ((x, y),) = batches(rng, 1)
    model.zero_grad()
    cross_entropy(model(x), y).backward()


def add(model, optimizer):
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": model[-1].parameters()})
    return "3.weight"


def unfreeze(model, _):
    model[0].requires_grad_(True)
    return "0.weight"


def replace_layer(model, optimizer):
    model[2] = nn.Linear(16, 3).double()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return "2.weight"


def replace_parameter(model, optimizer):
    model[2].bias = nn.Parameter(torch.zeros(3).double())
    optimizer.add_param_group({"params": [model[2].bias]})
    return "2.bias"


CHANGES = [add, unfreeze, replace_layer, replace_parameter]


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_comes_after_attaching_is_named(change, rng):
    model = small_classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3)
    backward(model, rng)
    optimizer.step()
    name = change(model, optimizer)
    backward(model, rng)
    with pytest.raises(RuntimeError, match=rf"parameter '{name}' is trained, but was"):
        optimizer.step()
    # The way out that the message names.
    grad_filter.detach()
    dome.attach(model, optimizer, rank=3)
    backward(model, rng)
    optimizer.step()


@pytest.mark.parametrize("change", [unfreeze, replace_layer])
def test_a_filter_called_by_hand_looks_at_the_model(change, rng):
    model = small_classifier()
    model[0].requires_grad_(False)
    grad_filter = dome.GradientFilter(model, rank=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = change(model, optimizer)
    backward(model, rng)
    with pytest.raises(RuntimeError, match=f"parameter '{name}' is trained"):
        grad_filter.step()


@pytest.mark.parametrize("by", ["tensors", "names"])
def test_who_chooses_parameters_leaves_later_ones_alone(by, rng):
    model = small_classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = list(model[2].parameters()) if by == "tensors" else ["2.*"]
    dome.attach(model, optimizer, rank=3, parameters=chosen)
    unfreeze(model, optimizer)
    backward(model, rng)
    plain = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.grad, plain)


def test_a_later_parameter_of_a_chosen_name_is_named(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=3, parameters="2.*")
    replace_layer(model, optimizer)
    backward(model, rng)
    with pytest.raises(RuntimeError, match=r"parameter '2\.weight' is trained"):
        optimizer.step()


def test_parameters_that_are_not_the_models_may_come_later(rng):
    model, temperature = small_classifier(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=3)
    optimizer.add_param_group({"params": [temperature]})
    ((x, y),) = batches(rng, 1)
    cross_entropy(model(x) * temperature.exp(), y).backward()
    optimizer.step()
    assert float(temperature.detach()) != 0


def test_tensors_and_names_are_taken_together():
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = [model[0].bias, "2.bias"]
    grad_filter = dome.attach(model, optimizer, rank=3, parameters=chosen)
    dim = model[0].bias.numel() + model[2].bias.numel()
    assert grad_filter.trackers["all"].basis.shape == (dim, 3)


def test_a_shared_parameter_is_known_by_each_of_its_names():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with dome.GradientFilter(model, rank=2, parameters="1.weight") as grad_filter:
        assert grad_filter.trackers["all"].basis.shape == (9, 2)


def test_a_filter_keeps_neither_model_nor_optimizer_alive(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    grad_filter.detach()
