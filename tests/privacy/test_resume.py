import copy

import pytest
import torch
from privacy.setting import attached, flat_grad, samples, train
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dome.privacy import PrivacyError
from dome.privacy.accounting import Budget, noise_multiplier_for
from dome.privacy.releases import Randomness

DELTA = 1e-5
DATA = TensorDataset(*samples(6))


def saved(model, private):
    """Both states, as a file would hold them."""
    return copy.deepcopy((model.state_dict(), private.state_dict()))


def resume(model, private, states, model_first=True):
    loads = [
        lambda: model.load_state_dict(states[0]),
        lambda: private.load_state_dict(states[1]),
    ]
    for load in loads if model_first else reversed(loads):
        load()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("basis", ["public", "released", "private"])
def test_a_run_goes_on_in_a_new_filter_whichever_state_is_loaded_first(
    basis, model_first
):
    model, optimizer, private = attached(basis)
    train(model, optimizer, private, DATA, epochs=3)
    states = saved(model, private)
    model, optimizer, again = attached(basis)
    resume(model, again, states, model_first)
    assert again.epsilon(DELTA) == private.epsilon(DELTA)
    train(model, optimizer, again, DATA)
    assert again.num_steps == 4


def test_parameters_that_are_not_those_of_the_state_are_refused():
    model, optimizer, private = attached()
    train(model, optimizer, private, DATA, epochs=2)
    early = saved(model, private)
    train(model, optimizer, private, DATA)
    late = saved(model, private)
    model, _, again = attached()
    resume(model, again, (late[0], early[1]))  # parameters of steps that it has not
    with pytest.raises(
        PrivacyError, match="not those that were saved with the loaded state"
    ):
        model(DATA[:][0])
    with pytest.raises(
        PrivacyError, match="not those that were saved with the loaded state"
    ):
        again.epsilon(DELTA)
    model.load_state_dict(early[0])
    assert again.epsilon(DELTA) > 0


def test_a_model_that_is_loaded_without_its_filters_state_is_refused():
    model, optimizer, private = attached()
    train(model, optimizer, private, DATA)
    states = saved(model, private)
    model, _, again = attached()
    model.load_state_dict(states[0])
    with pytest.raises(PrivacyError, match="changed without a step"):
        again.epsilon(DELTA)


def test_weights_may_be_loaded_on_the_users_word():
    model, optimizer, private = attached()
    weights = {name: 0.5 * p for name, p in model.state_dict().items()}
    with private.public_changes():
        model.load_state_dict(weights)
    train(model, optimizer, private, DATA)
    assert private.num_steps == 1


def test_an_older_state_does_not_lower_epsilon():
    model, optimizer, private = attached()
    train(model, optimizer, private, DATA)
    older = saved(model, private)
    train(model, optimizer, private, DATA, epochs=2)
    spent = private.epsilon(DELTA)
    for _ in range(2):
        resume(model, private, older)
        assert (private.num_steps, private.epsilon(DELTA)) == (3, spent)
    train(model, optimizer, private, DATA)
    assert private.num_steps == 4


def test_a_filter_made_anew_knows_what_the_process_has_spent():
    model, optimizer, private = attached()
    train(model, optimizer, private, DATA)
    older = saved(model, private)
    train(model, optimizer, private, DATA, epochs=2)
    model, _, again = attached()
    resume(model, again, older)
    assert again.epsilon(DELTA) == private.epsilon(DELTA)


def test_runs_that_led_to_a_state_add_up():
    budget = Budget(1.0, 0.1)
    for _ in range(4):
        other = Budget(1.0, 0.1)
        other.load_state_dict(budget.state_dict())
        other.spend()
        budget = other
    straight = Budget(1.0, 0.1)
    for _ in range(4):
        straight.spend()
    assert budget.num_steps == 4
    assert budget.epsilon(DELTA) == straight.epsilon(DELTA)


@pytest.mark.parametrize("name", ["budget.runs", "guard.values"])
def test_a_state_that_does_not_tell_its_runs_or_its_parameters_is_refused(name):
    model, optimizer, private = attached()
    train(model, optimizer, private, DATA, epochs=2)
    state = private.state_dict()
    del state[name]
    _, _, again = attached()
    with pytest.raises(ValueError, match="first edition of dome, or is damaged"):
        again.load_state_dict(state)
    assert again.num_steps == 0


@pytest.mark.parametrize(
    "row", [[1.0, 0.1, -2.0], [0.0, 0.1, 2.0], [1.0, 1.5, 2.0], [1.0, 0.1, torch.nan]]
)
def test_costs_that_cannot_be_are_refused(row):
    budget = Budget(1.0, 0.1)
    state = budget.state_dict() | {"history": torch.tensor([row])}
    with pytest.raises(ValueError, match="which is impossible: it is damaged"):
        budget.load_state_dict(state)


TARGETS = {"target_epsilon": 2.0, "target_delta": DELTA, "steps": 4}


def test_a_run_beyond_its_target_is_refused_and_nothing_is_changed():
    model, optimizer, private = attached(noise_multiplier=0.5)
    train(model, optimizer, private, DATA, epochs=2)
    states = saved(model, private)
    _, _, again = attached(**TARGETS)
    before = again.state_dict()
    with pytest.raises(
        PrivacyError, match=r"spent epsilon .* more than target_epsilon"
    ):
        again.load_state_dict(states[1])
    after = again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_that_would_end_beyond_its_target_is_refused():
    sigma = noise_multiplier_for(1.8, DELTA, 1, 1.0)
    model, optimizer, private = attached(noise_multiplier=sigma)
    train(model, optimizer, private, DATA)
    states = saved(model, private)
    _, _, again = attached(**TARGETS | {"steps": 2})
    with pytest.raises(PrivacyError, match=r"the 1 steps that are left"):
        again.load_state_dict(states[1])


def test_a_run_goes_on_to_its_target():
    model, optimizer, private = attached(**TARGETS)
    train(model, optimizer, private, DATA, epochs=2)
    states = saved(model, private)
    model, optimizer, again = attached(**TARGETS)
    resume(model, again, states)
    train(model, optimizer, again, DATA, epochs=2)
    assert 1.9 < again.epsilon(DELTA) <= 2.0
    with pytest.raises(PrivacyError, match="all of them are taken"):
        next(iter(again.loader(DATA)))


def test_a_seeded_generator_does_not_repeat_its_noise_on_resume():
    def noise_of(steps, states=None):
        model, optimizer, private = attached(
            rank=0, lr=0.0, sample_rate=0.5, max_grad_norm=1e-9, noise_multiplier=1e9
        )
        if states is not None:
            resume(model, private, states)
        seen, sizes = [], []
        for x, y in (b for _ in range(steps) for b in private.loader(DATA)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append(flat_grad(model))
            sizes.append(len(x))
        return seen, sizes, saved(model, private)

    first, _, states = noise_of(2)
    second, _, _ = noise_of(2, states)
    again, _, _ = noise_of(2, states)
    for new in second:
        assert all((new - old).norm() > 0.1 * old.norm() for old in first)
    # Reproducible all the same: from the same seed and the same number of steps.
    assert all(torch.equal(a, b) for a, b in zip(second, again, strict=True))


def test_a_source_that_goes_on_draws_other_numbers():
    sources = [Randomness(torch.Generator().manual_seed(3)) for _ in range(4)]
    for source, number in zip(sources, (None, 5, 5, 6), strict=True):
        if number is not None:
            source.go_on(number)
    plain, first, same, other = (s.gaussian((4,), 1.0) for s in sources)
    assert torch.equal(first, same)
    assert len({float(t[0]) for t in (plain, first, other)}) == 3
    Randomness().go_on(3)  # the operating system's numbers never repeat


def test_a_parameter_frozen_after_attach_is_not_moved_by_noise():
    model, optimizer, private = attached()
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, private, DATA, epochs=2)
    model[0].requires_grad_(False)
    before = model[0].weight.clone(), model[2].weight.clone()
    train(model, optimizer, private, DATA, epochs=2)
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[2].weight, before[1])
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    train(model, optimizer, private, DATA)
    assert not torch.equal(model[0].weight, before[0])


def test_a_basis_that_is_not_orthonormal_is_refused():
    model, optimizer, private = attached("private")
    train(model, optimizer, private, DATA)
    state = private.state_dict()
    state["basis.basis"] = 2 * state["basis.basis"]
    with pytest.raises(ValueError, match="not orthonormal"):
        private.load_state_dict(state)
