import math

import pytest
import torch
from models import small_classifier
from opacus import GradSampleModule
from privacy.setting import attach, samples, train
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dome
from dome.privacy import PrivacyError


@pytest.fixture
def model():
    return small_classifier()


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "basis",
    [
        "power",
        "svd",
        "samples",
        None,
        dome.StreamingPower(195, 2),
        dome.StreamingPower,
    ],
)
def test_a_basis_that_private_samples_turn_is_refused_with_the_reason(
    model, optimizer, basis
):
    with pytest.raises(PrivacyError, match="reveals them") as refused:
        attach(model, optimizer, basis)
    for choice in ("public", "released", "private"):
        assert repr(choice) in str(refused.value)


def test_an_ordinary_filter_does_not_go_beside_a_private_one(model, optimizer):
    attach(model, optimizer)
    with pytest.raises(RuntimeError, match="already has a filter"):
        dome.attach(model, optimizer, rank=2)


def test_a_private_filter_does_not_go_beside_an_ordinary_one(model, optimizer):
    dome.attach(model, optimizer, rank=2)
    with pytest.raises(RuntimeError, match="already has a filter"):
        attach(model, optimizer)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_refused_in_either_mode(training):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).train(training)
    with pytest.raises(PrivacyError, match=r"layer '1' is batch norm.*GroupNorm"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_statistics_without_noise_are_refused():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.InstanceNorm1d(2, affine=True))
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    with pytest.raises(PrivacyError, match="track_running_stats=False"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shorten_the_rows_of_a_batch_are_refused(layer):
    model = nn.Sequential(layer(5, 3, max_norm=1.0))
    with pytest.raises(PrivacyError, match="layer '0' shortens the rows"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_under_opacus_is_refused(model):
    wrapped = GradSampleModule(model)
    with pytest.raises(PrivacyError, match="Opacus' hooks already"):
        attach(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))


def test_a_parameter_that_is_not_the_models_is_refused(model):
    stray = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.1)
    with pytest.raises(PrivacyError, match="not in the model"):
        attach(model, optimizer)


def test_a_parameter_that_another_optimizer_trains_is_refused(model):
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(PrivacyError, match=r"'2.weight' can be trained"):
        attach(model, optimizer)


def test_a_parameter_that_is_added_later_is_refused(model, optimizer):
    private = attach(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(PrivacyError, match="added or"):
        train(model, optimizer, private, samples(6))


def test_a_parameter_that_is_unfrozen_later_is_refused(model):
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    model[0].weight.requires_grad_(True)
    with pytest.raises(PrivacyError, match="unfrozen"):
        train(model, optimizer, private, samples(6))


def test_batches_from_elsewhere_are_refused(model, optimizer):
    private = attach(model, optimizer)
    x, y = samples(6)
    cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match=r"train on the batches of \.loader"):
        optimizer.step()
    private.loader(TensorDataset(x, y))
    with pytest.raises(PrivacyError, match="Poisson sampling"):
        optimizer.step()


def test_a_batch_is_not_used_twice(model, optimizer):
    private = attach(model, optimizer)
    for x, y in private.loader(TensorDataset(*samples(6))):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyError, match="without a new batch"):
            optimizer.step()


def test_a_closure_that_runs_twice_is_refused(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    private = attach(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    for x, y in private.loader(TensorDataset(*samples(6))):  # noqa: B007 (the closure's)
        with pytest.raises(PrivacyError, match="closure that is called twice"):
            optimizer.step(closure)


def test_a_batch_that_is_passed_over_is_noticed(model, optimizer):
    private = attach(model, optimizer, sample_rate=0.2)
    with pytest.raises(PrivacyError, match="also for an empty one"):
        for _ in private.loader(TensorDataset(*samples(6))):
            pass


def test_part_of_a_batch_is_refused(model, optimizer):
    private = attach(model, optimizer)
    for x, y in private.loader(TensorDataset(*samples(6))):
        cross_entropy(model(x[:4]), y[:4]).backward()
        with pytest.raises(PrivacyError, match=r"has 6 samples, but backward.* saw 4"):
            optimizer.step()


def test_parts_with_a_mean_each_are_refused(model, optimizer):
    private = attach(model, optimizer)
    for x, y in private.loader(TensorDataset(*samples(6))):
        for part in (slice(0, 2), slice(2, 6)):
            cross_entropy(model(x[part]), y[part]).backward()
        with pytest.raises(PrivacyError, match=r"called 2 times.*'sum'"):
            optimizer.step()


def test_a_penalty_in_the_loss_is_refused(model, optimizer):
    private = attach(model, optimizer)
    for x, y in private.loader(TensorDataset(*samples(6))):
        penalty = sum(p.square().sum() for p in model.parameters())
        (cross_entropy(model(x), y) + 0.1 * penalty).backward()
        with pytest.raises(PrivacyError, match="weight_decay instead"):
            optimizer.step()


@pytest.mark.parametrize(
    "option",
    [{"batch_size": 4}, {"shuffle": True}, {"drop_last": True}, {"sampler": [0, 1]}],
)
def test_options_that_choose_samples_are_refused(model, optimizer, option):
    private = attach(model, optimizer)
    with pytest.raises(PrivacyError, match=f"{next(iter(option))} chooses samples"):
        private.loader(TensorDataset(*samples(6)), **option)


def test_a_stream_without_a_length_is_refused(model, optimizer):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(PrivacyError, match="data set with a length"):
        attach(model, optimizer).loader(Stream())


def test_a_second_data_set_is_refused(model, optimizer):
    private = attach(model, optimizer)
    dataset = TensorDataset(*samples(6))
    assert private.loader(dataset) is private.loader(DataLoader(dataset, batch_size=2))
    with pytest.raises(PrivacyError, match="already has a data set"):
        private.loader(TensorDataset(*samples(7)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a positive"),
        ({"noise_multiplier": None}, "or all of target_epsilon"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "not both"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a positive"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a positive"),
        ({"sample_rate": 0.0}, "in \\(0, 1\\]; got 0.0"),
        ({"sample_rate": 1.5}, "in \\(0, 1\\]; got 1.5"),
        ({"basis_share": 1.0}, "basis_share lie between"),
        ({"rank": -1}, "rank must not be negative"),
        ({"rank": 196}, "195"),
        ({"update_every": 0}, "update_every be at least 1"),
        ({"window": 1}, "window must be at least 2"),
        ({"tracker": "pca"}, "tracker must be one of"),
        ({"public": []}, "the other bases accept neither"),
        ({"basis": "public", "public": None}, "needs public=batches"),
        ({"expected_batch_size": 0}, "expected_batch_size must be a positive"),
    ],
)
def test_bad_options_are_refused(model, optimizer, options, message):
    if "target_epsilon" in options:
        pytest.importorskip("opacus")
        with pytest.raises(ValueError, match=message):
            dome.privacy.attach(
                model, optimizer, 2, 1.0, sample_rate=0.5, basis="released", **options
            )
        return
    with pytest.raises(ValueError, match=message):
        attach(model, optimizer, **options)
