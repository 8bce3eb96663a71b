# Loops that would lose the guarantee without noticing. Each is refused, or paid for.

import copy
import math

import pytest
import torch
from models import small_classifier
from privacy.setting import attach, attached, samples, train
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dome.privacy import PrivacyError

DELTA = 1e-5


def raw_step(model, x, y):
    """What an optimizer that knows of no filter does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    model.zero_grad()


def by_hand(model, x, y):
    """Behind autograd's back: the parameters' versions stay as they are."""
    cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad
    model.zero_grad()


def by_swapping(model, x, y):
    cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad
    model.zero_grad()


@pytest.fixture
def loop():
    """Three parts of a private loop that has taken two steps."""
    model, optimizer, private = attached()
    train(model, optimizer, private, samples(6), epochs=2)
    return model, optimizer, private


@pytest.mark.parametrize("change", [raw_step, by_hand, by_swapping])
def test_parameters_that_moved_without_a_paid_step_are_noticed(loop, change):
    model, _, private = loop
    change(model, *samples(6))
    for look in (lambda: model(samples(6)[0]), lambda: private.epsilon(DELTA)):
        with pytest.raises(PrivacyError, match=r"'0.weight' changed without a step"):
            look()
    with torch.no_grad(), pytest.raises(PrivacyError, match="changed without a step"):
        model(samples(2)[0])
    with pytest.raises(PrivacyError, match="changed without a step"):
        private.state_dict()


def test_the_first_batch_may_not_train_an_optimizer_made_anew():
    model, _, private = attached()
    x, y = next(iter(private.loader(TensorDataset(*samples(6)))))
    raw_step(model, x, y)
    with pytest.raises(PrivacyError, match="changed without a step"):
        private.epsilon(DELTA)


def test_a_refused_parameter_stays_refused(loop):
    model, optimizer, private = loop
    raw_step(model, *samples(6))
    for match in ("changed without a step", "no step was taken with it"):
        with pytest.raises(PrivacyError, match=match):
            train(model, optimizer, private, private._loader.dataset)
    with pytest.raises(PrivacyError, match="changed without a step"):
        private.epsilon(DELTA)


def test_a_frozen_parameter_that_was_trained_aside_is_noticed():
    model = small_classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    private = attach(model, optimizer)
    model[0].requires_grad_(True)
    raw_step(model[0], *samples(6))
    model[0].requires_grad_(False)
    with pytest.raises(PrivacyError, match=r"'0.weight' changed without a step"):
        private.epsilon(DELTA)


def test_a_layer_that_was_put_in_and_trained_aside_is_noticed(loop):
    model, _, private = loop
    model[2] = nn.Linear(16, 3, dtype=torch.float64)
    with pytest.raises(PrivacyError, match=r"'2.weight' can be trained, but not"):
        private.epsilon(DELTA)


def test_parameters_that_became_nan_are_still_the_same():
    model, optimizer, private = attached(after=lambda g: math.nan * g)
    train(model, optimizer, private, samples(6), epochs=2)
    assert model[0].weight.isnan().any()
    assert private.epsilon(DELTA) > 0


def test_a_step_that_broke_off_has_been_paid_for(loop):
    model, optimizer, private = loop

    def interrupted(*_, **__):
        with torch.no_grad():
            model[0].weight.add_(1.0)
        raise KeyboardInterrupt

    loader = private.loader(private._loader.dataset)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        handle = optimizer.register_step_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        handle.remove()
    assert private.num_steps == 3
    train(model, optimizer, private, private._loader.dataset)
    assert private.num_steps == 4


def test_public_changes_are_taken_on_the_users_word(loop):
    model, optimizer, private = loop
    with private.public_changes():
        raw_step(model, *samples(5, seed=77))
    assert private.num_steps == 2
    train(model, optimizer, private, private._loader.dataset)


def test_public_changes_that_fail_are_not_taken(loop):
    model, _, private = loop

    def interrupted():
        with private.public_changes():
            raw_step(model, *samples(5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(PrivacyError, match="changed without a step"):
        private.epsilon(DELTA)


def test_public_changes_have_no_private_batch_beside_them(loop):
    _, _, private = loop
    batches = iter(private.loader(private._loader.dataset))
    with (
        pytest.raises(PrivacyError, match="a private batch waits"),
        private.public_changes(),
    ):
        next(batches)
    with (
        pytest.raises(PrivacyError, match="a private batch waits"),
        private.public_changes(),
    ):
        pass


def test_after_detach_parameters_are_free_and_the_cost_stays(loop):
    model, _, private = loop
    before = private.epsilon(DELTA)
    private.detach()
    raw_step(model, *samples(6))
    assert private.epsilon(DELTA) == before


def test_a_copy_of_the_model_is_not_guarded(loop):
    model, _, private = loop
    other = copy.deepcopy(model)
    raw_step(other, *samples(6))
    other(samples(6)[0])
    assert private.epsilon(DELTA) > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_drawn_and_not_stepped_is_paid_for_across_iterators(workers):
    model, optimizer, private = attached(sample_rate=0.5)
    loader = private.loader(TensorDataset(*samples(6)), num_workers=workers)
    next(iter(loader))
    with pytest.raises(PrivacyError, match="no step was taken with it"):
        next(iter(loader))
    assert private.num_steps == 1
    train(model, optimizer, private, loader.dataset)
    assert private.num_steps == 3


def test_epsilon_has_the_batch_in_it_that_is_being_trained_on():
    model, optimizer, private = attached()
    free = private.epsilon(DELTA)
    for x, y in private.loader(TensorDataset(*samples(6))):
        drawn = private.epsilon(DELTA)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert free == 0
    assert drawn == private.epsilon(DELTA) > 0
    assert private.num_steps == 1


def test_a_step_that_was_refused_leaves_its_batch_to_be_paid_for():
    model, optimizer, private = attached()
    loader = private.loader(TensorDataset(*samples(6)))
    for x, y in loader:
        cross_entropy(model(x[:4]), y[:4]).backward()
        with pytest.raises(PrivacyError, match=r"has 6 samples, but backward.* saw 4"):
            optimizer.step()
    with pytest.raises(PrivacyError, match="no step was taken with it"):
        next(iter(loader))
    assert private.num_steps == 1


def test_as_many_samples_from_elsewhere_are_refused():
    model, optimizer, private = attached()
    for _ in private.loader(TensorDataset(*samples(6))):
        optimizer.zero_grad()
        x, y = samples(6, seed=8)
        cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyError, match="not that of all samples of this batch"):
            optimizer.step()


def test_the_gradient_of_another_batch_is_refused():
    model, optimizer, private = attached()
    x, y = samples(6, seed=8)
    loss = cross_entropy(model(x), y)
    for a, _ in private.loader(TensorDataset(*samples(6))):
        model(a)
        loss.backward()
        with pytest.raises(PrivacyError, match="not that of all samples of this batch"):
            optimizer.step()


def test_one_sample_in_the_place_of_another_is_refused():
    model, optimizer, private = attached(loss_reduction="sum")
    for x, y in private.loader(TensorDataset(*samples(6))):
        for i in (0, 1, 2, 3, 4, 4):
            loss = cross_entropy(model(x[i : i + 1]), y[i : i + 1], reduction="sum")
            loss.backward()
        with pytest.raises(PrivacyError, match="not that of all samples of this batch"):
            optimizer.step()


@pytest.mark.parametrize("turned", [False, True])
def test_calls_that_share_rows_must_have_their_samples_in_the_same_order(turned):
    model, optimizer, private = attached()
    first, _ = samples(6)
    first[1] = first[0]  # samples that are alike are still two
    second, _ = samples(6, seed=9)
    for a, b in private.loader(TensorDataset(first, second)):
        difference = model(a) - (model(b.flip(0)).flip(0) if turned else model(b))
        difference.square().sum(dim=1).mean().backward()
        if turned:  # a sample would be in two rows, and clipped in each
            with pytest.raises(
                PrivacyError, match="not that of all samples of this batch"
            ):
                optimizer.step()
        else:
            optimizer.step()


def test_samples_that_are_alike_are_told_apart_in_parts():
    model, optimizer, private = attached(loss_reduction="sum")
    x, y = samples(6)
    x[3:], y[3:] = x[:3].clone(), y[:3].clone()
    for a, b in private.loader(TensorDataset(x, y)):
        optimizer.zero_grad()
        for part in zip(a.tensor_split(3), b.tensor_split(3), strict=True):
            cross_entropy(model(part[0]), part[1], reduction="sum").backward()
        optimizer.step()
    assert private.num_steps == 1


def test_samples_that_were_mixed_before_the_model_are_refused():
    model, optimizer, private = attached()
    for x, y in private.loader(TensorDataset(*samples(6))):
        cross_entropy(model(x - x.mean(dim=0)), y).backward()
        with pytest.raises(PrivacyError, match="not that of all samples of this batch"):
            optimizer.step()


def test_samples_that_were_changed_in_place_are_refused():
    model, optimizer, private = attached()
    for x, y in private.loader(TensorDataset(*samples(6))):
        x.sub_(x.mean(dim=0))
        cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyError, match="not that of all samples of this batch"):
            optimizer.step()


LEGAL = {
    "as it came": lambda x: x,
    "a copy": lambda x: x.clone(),
    "in another order": lambda x: x.flip(0),
    "with other dimensions": lambda x: x.view(len(x), 2, 4).transpose(1, 2),
    "moved": lambda x: x.to("cpu", copy=True),
    "in single precision": lambda x: x.float(),
    "as an unused leaf": lambda x: x.detach().requires_grad_(),
}


@pytest.mark.parametrize("change", LEGAL.values(), ids=LEGAL.keys())
def test_what_may_be_done_to_a_batch_before_the_model(change):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_classifier()

        def forward(self, x):
            return self.inner(x.flatten(1).double())

    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, sample_rate=0.5)
    for x, _ in private.loader(TensorDataset(*samples(12))):
        optimizer.zero_grad()
        model(change(x)).square().sum(dim=1).mean().backward()
        optimizer.step()
    assert private.num_steps == 2


def test_a_look_at_other_samples_between_draw_and_step_is_no_harm():
    model, optimizer, private = attached()
    other = samples(4, seed=9)[0]
    for x, y in private.loader(TensorDataset(*samples(6))):
        model(other)  # with gradients switched on, and none taken
        model(x)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.num_steps == 1


def test_a_gradient_that_was_thrown_away_counts_as_none():
    model, optimizer, private = attached()
    for x, y in private.loader(TensorDataset(*samples(6))):
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.num_steps == 1


def test_batches_without_tensors_are_refused():
    _, _, private = attached()
    loader = private.loader(["one", "two"])
    with pytest.raises(PrivacyError, match="has no tensors"):
        next(iter(loader))


def test_a_state_has_the_batch_in_it_that_waits_for_its_step():
    model, optimizer, private = attached()
    for x, y in private.loader(TensorDataset(*samples(6))):
        waiting = private.state_dict()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(
        waiting["budget.history"], private.state_dict()["budget.history"]
    )
