import pytest
import torch
from models import batches, small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome


def test_a_model_with_dropout_agrees_and_keeps_its_mode_and_gradients(rng):
    model = nn.Sequential(small_classifier(), nn.Dropout(0.5)).train()
    (x, y), *_ = batches(rng, 1)
    report = dome.verify(model, cross_entropy, x, y)
    assert report.ok
    assert "4 parameters, 12 samples: captured gradients agree" in str(report)
    assert model[1].training
    assert all(p.grad is None for p in model.parameters())


def test_the_parameter_that_differs_is_named(rng, monkeypatch):
    model = small_classifier()
    (x, y), *_ = batches(rng, 1)
    right = dome.per_sample_gradients(model, cross_entropy, x, y)
    wrong = right.clone()
    wrong[3, 150] *= 2  # a weight of the second layer
    monkeypatch.setattr(
        "dome.verification.per_sample_gradients", lambda *_: wrong, raising=True
    )
    report = dome.verify(model, cross_entropy, x, y)
    assert not report.ok
    assert [e.name for e in report.wrong] == ["2.weight"]
    assert "2.weight" in str(report)
    assert 'samples="microbatch"' in str(report)


def test_samples_that_see_each_other_are_found(rng):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            z = self.linear(x)
            return z - z.mean(dim=0)  # every prediction depends on the whole batch

    report = dome.verify(Mixes().double(), cross_entropy, *next(batches(rng, 1)))
    assert not report.ok


def test_verify_works_while_a_filter_is_attached(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3)
    (x, y), *_ = batches(rng, 1)
    assert dome.verify(model, cross_entropy, x, y).ok
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert grad_filter.stats.step == 1
    assert grad_filter.stats.skipped_updates == 0


def test_batch_norm_in_training_mode_is_refused_by_name(rng):
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="layer '1' is batch norm in training mode"):
        dome.verify(model, cross_entropy, *next(batches(rng, 1)))
