import pytest
import torch
from models import small_classifier
from privacy.setting import samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dome
from dome.privacy import PrivacyError

pytest.importorskip("opacus")

DATA = TensorDataset(*samples(23))
LOADER = DataLoader(DATA, batch_size=5)  # five batches, the last a short one
TARGET = {"target_epsilon": 5.0, "target_delta": 1e-5}


def attached(**options):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"rank": 0, "max_grad_norm": 1.0, "data": LOADER} | options
    return model, optimizer, dome.privacy.attach(model, optimizer, **chosen)


def step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def test_after_all_epochs_all_steps_are_taken_and_epsilon_is_the_target():
    model, optimizer, private = attached(**TARGET, epochs=3)
    for _ in range(3):
        for batch in private.loader():
            step(model, optimizer, batch)
    assert private.num_steps == 3 * len(LOADER)
    # The noise multiplier is solved for to a hundredth of the target.
    assert 0.99 * 5 <= private.epsilon() <= 5
    with pytest.raises(PrivacyError, match="all of them are taken"):
        step(model, optimizer, next(iter(private.loader())))


def test_a_loader_and_epochs_are_a_rate_and_steps_by_hand():
    *_, easy = attached(**TARGET, epochs=3)
    *_, by_hand = attached(**TARGET, steps=15, data=None, sample_rate=1 / 5)
    assert easy.noise_multiplier == by_hand.noise_multiplier
    *_, of_data = attached(**TARGET, epochs=3, data=DATA, sample_rate=1 / 5)
    assert of_data.noise_multiplier == easy.noise_multiplier
    of_data.loader(), easy.loader()
    assert of_data.expected_batch_size == easy.expected_batch_size
    assert easy.expected_batch_size == pytest.approx(23 / 5)


def test_epochs_bound_the_steps_of_a_given_noise_multiplier_too():
    model, optimizer, private = attached(noise_multiplier=1.0, epochs=1)
    for batch in private.loader():
        step(model, optimizer, batch)
    with pytest.raises(PrivacyError, match="chosen for 5 steps"):
        step(model, optimizer, next(iter(private.loader())))


def test_epsilon_remembers_delta():
    for options in (
        TARGET | {"epochs": 2},
        {"noise_multiplier": 1.0, "target_delta": 1e-5},
    ):
        model, optimizer, private = attached(**options)
        step(model, optimizer, next(iter(private.loader())))
        assert private.epsilon() == private.epsilon(1e-5) > private.epsilon(1e-3) > 0


def test_epsilon_without_any_delta_is_an_error():
    *_, private = attached(noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"epsilon depends on delta: pass one"):
        private.epsilon()
    assert private.epsilon(1e-5) == 0


def test_the_loader_keeps_its_collation():
    seen = []

    def collate(rows):
        seen.append(len(rows))
        return torch.utils.data.default_collate(rows)

    *_, private = attached(
        noise_multiplier=1.0, data=DataLoader(DATA, batch_size=5, collate_fn=collate)
    )
    next(iter(private.loader()))
    assert seen
    assert private.loader() is private.loader()


@pytest.mark.parametrize("rank", [2, 0])
def test_a_basis_is_needed_where_there_is_one(rank):
    if rank:
        with pytest.raises(PrivacyError, match=r"basis=None.*Choose 'public'"):
            attached(noise_multiplier=1.0, rank=rank)
    else:
        _, _, plain = attached(noise_multiplier=1.0)
        _, _, named = attached(noise_multiplier=1.0, basis="released")
        assert plain.state_dict().keys() == named.state_dict().keys()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample_rate": 0.1}, ValueError, r"given twice: .* 5 batches, and so 0\.2"),
        ({"data": DATA}, ValueError, "is not known: pass sample_rate, or data=loader"),
        ({"data": None}, ValueError, "is not known: pass sample_rate, or data=loader"),
        ({"epochs": 2, "steps": 3}, ValueError, "epochs or steps, not both; got 2 and"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": 1.5}, ValueError, r"epochs must be a whole number, got 1\.5"),
        ({"target_delta": 2.0}, ValueError, "delta must lie between 0 and 1, got 2"),
        ({"data": DataLoader(Stream())}, PrivacyError, "samples by number, got Stream"),
        ({"data": Stream()}, PrivacyError, "samples by number, got Stream"),
    ],
)
def test_bad_plans_are_refused_at_attach(options, error, message):
    with pytest.raises(error, match=message):
        attached(**{"noise_multiplier": 1.0} | options)


def test_a_loader_needs_a_data_set():
    *_, private = attached(noise_multiplier=1.0, data=None, sample_rate=0.2)
    with pytest.raises(PrivacyError, match="no data set is known"):
        private.loader()
