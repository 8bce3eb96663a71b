"""States of filters: whatever is refused is refused by name, and changes nothing."""

import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.compression import ErrorFeedback, PowerSGD, RandomK, TopK
from dome.continual import EWC


def trained(num_steps=3, **options):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, **{"rank": 4} | options)
    rng = torch.Generator().manual_seed(num_steps)
    for x, y in batches(rng, num_steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return grad_filter


def nan(tensor):
    return torch.full_like(tensor, torch.nan)


STAGES = {
    "noise": lambda: [RandomK(4.0)],
    "feedback": lambda: [RandomK(4.0), ErrorFeedback(TopK(5.0))],
}
DAMAGES = {
    "without steps": ("num_steps", None, "no 'num_steps'"),
    "negative steps": ("num_steps", lambda t: t - 100, "'num_steps' in the state is"),
    "half a step": ("num_steps", lambda t: t + 0.5, "'num_steps' in the state is"),
    "another layer": ("blocks.0.Q", None, "block '0'.* no 'Q'"),
    "a basis of NaN": ("blocks.2.basis", nan, "block '2'.*not orthonormal"),
    "a stage of NaN": ("after.1.error", nan, "ErrorFeedback.*not a vector of finite"),
    "a stage in the past": ("after.0.step", lambda t: -t, "'step' in the state of a"),
    "a stage without steps": ("after.0.step", None, "it has no 'step'"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_state_is_refused_before_anything_is_changed(kind):
    entry, change, message = DAMAGES[kind]
    options = {"layout": "layerwise"}
    saved = trained(5, after=STAGES["feedback"](), **options).state_dict()
    value = saved.pop(entry)
    saved |= {} if change is None else {entry: change(value)}
    grad_filter = trained(3, after=STAGES["feedback"](), **options)
    before = grad_filter.state_dict()
    with pytest.raises(ValueError, match=message):
        grad_filter.load_state_dict(saved)
    after = grad_filter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("tracker", ["power", "svd"])
@pytest.mark.parametrize("stages", STAGES)
def test_a_state_is_a_snapshot_that_later_steps_do_not_change(tracker, stages):
    grad_filter = trained(3, tracker=tracker, after=STAGES[stages]())
    state = grad_filter.state_dict()
    copies = {name: value.clone() for name, value in state.items()}
    for _ in range(3):
        grad_filter.observe(torch.randn(8, 195, dtype=torch.float64))
        grad_filter.filter_()
    assert not torch.equal(
        grad_filter.state_dict()["blocks.all.basis"], state["blocks.all.basis"]
    )
    assert all(torch.equal(state[name], copies[name]) for name in copies)
    grad_filter.load_state_dict(state)
    restored = grad_filter.state_dict()
    assert all(torch.equal(restored[name], copies[name]) for name in copies)


def test_matrices_of_powersgd_that_are_not_finite_are_refused():
    compressor = PowerSGD([(9, 11)])
    compressor(torch.ones(99))
    state = compressor.state_dict()
    with pytest.raises(ValueError, match="the saved Q of a PowerSGD is not finite"):
        compressor.load_state_dict(state | {"right": nan(state["right"])})
    after = compressor.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("fisher", nan, "'fisher' in the state of an EWC is not finite"),
        ("fisher", lambda t: t - 9.0, "'fisher' in the state of an EWC is not finite"),
        ("anchor", lambda t: t[1:], "no 'anchor' of this model"),
        ("num_tasks", lambda t: -t - 1, "'num_tasks' in the state is"),
    ],
)
def test_a_damaged_state_of_ewc_is_refused(entry, change, message):
    ewc = EWC(small_classifier(), strength=1.0)
    state = ewc.state_dict()
    with pytest.raises(ValueError, match=message):
        ewc.load_state_dict(state | {entry: change(state[entry])})
    after = ewc.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)
