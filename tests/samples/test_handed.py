import copy

import pytest
import torch
from models import small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.samples.store import factors
from dome.trackers.factors import Product

FORMS = pytest.mark.parametrize("form_rows", [True, False], ids=["rows", "factors"])


class Words(nn.Module):
    """An embedding, a convolution, a norm and a linear map; one that is not used."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 12)
        self.conv = nn.Conv1d(12, 9, 3, padding=1)
        self.norm = nn.LayerNorm(9)
        self.off = nn.Linear(3, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(self.words(x).mT).mT).mean(1))


def words(rng, num=6):
    x = torch.randint(40, (num, 7), generator=rng)
    return x, torch.randint(5, (num,), generator=rng)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(factors, "SMALL_WEIGHT", 0)
    torch.manual_seed(0)
    return Words().double()


@FORMS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_samples_in_a_loop_are_those_of_the_function(rng, model, form_rows, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"loss_reduction": reduction}
    with dome.sample_gradients(model, form_rows=form_rows, **how) as samples:
        for _ in range(3):
            x, y = words(rng)
            G = dome.per_sample_gradients(model, cross_entropy, x, y, **how)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.testing.assert_close(samples.norms(), G.norm(dim=1))
            torch.testing.assert_close(samples.rows(), G)
            by_layer = dict(samples.layers())
            assert list(by_layer) == ["words", "conv", "norm", "off", "head"]
            torch.testing.assert_close(torch.cat([*by_layer.values()], dim=1), G)
            assert len(samples) == 6
            optimizer.step()


def test_norms_form_no_rows_of_what_is_a_product(rng, model, monkeypatch):
    x, y = words(rng)
    monkeypatch.setattr(Product, "rows", lambda _: pytest.fail("rows were formed"))
    with dome.sample_gradients(model, form_rows=False) as samples:
        cross_entropy(model(x), y).backward()
        assert samples.norms().shape == (6,)
        with pytest.raises(pytest.fail.Exception, match="rows were formed"):
            samples.rows()


@FORMS
def test_accumulated_batches_stand_behind_each_other(rng, model, form_rows):
    first, second = words(rng, 4), words(rng, 2)
    how = {"loss_reduction": "sum"}
    G = [
        dome.per_sample_gradients(model, cross_entropy, *b, **how)
        for b in (first, second)
    ]
    with dome.sample_gradients(model, form_rows=form_rows, **how) as samples:
        for x, y in (first, second):
            cross_entropy(model(x), y).backward()
        torch.testing.assert_close(samples.rows(), torch.cat(G))
        cross_entropy(model(first[0]), first[1]).backward()
        torch.testing.assert_close(samples.rows(), G[0])


def test_training_is_the_same_with_it_and_a_filter_may_be_attached(rng):
    ends = []
    data = [(torch.randn(9, 8, generator=rng).double(), torch.arange(9) % 3)] * 3
    for watched in (False, True):
        model = small_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dome.attach(model, optimizer, rank=3)
        for x, y in data:
            optimizer.zero_grad()
            if watched:
                with dome.sample_gradients(model) as samples:
                    cross_entropy(model(x), y).backward()
                    assert samples.rows().shape == (9, 195)
            else:
                cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


@FORMS
def test_only_some_parameters(rng, model, form_rows):
    x, y = words(rng)
    with dome.sample_gradients(
        model, form_rows=form_rows, parameters="head.*"
    ) as samples:
        cross_entropy(model(x), y).backward()
        assert samples.rows().shape == (6, 50)


def test_asked_too_early_or_too_late_is_an_error_that_says_when(rng, model):
    x, y = words(rng)
    with dome.sample_gradients(model) as samples:
        with pytest.raises(RuntimeError, match=r"after loss.backward\(\), before"):
            samples.rows()
        cross_entropy(model(x), y).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"after loss.backward\(\), before"):
            samples.norms()


def test_a_model_that_was_not_called_is_an_error(rng, model):
    x, y = words(rng)
    with dome.sample_gradients(model) as samples:
        cross_entropy(model.forward(x), y).backward()
        with pytest.raises(RuntimeError, match="no samples were captured"):
            samples.rows()


def test_nothing_is_left_behind(rng, model):
    before = copy.deepcopy(dict(model.__dict__), {})
    with dome.sample_gradients(model):
        pass
    assert model._forward_hooks == before["_forward_hooks"]
    assert model._forward_pre_hooks == before["_forward_pre_hooks"]


def test_a_bad_reduction_is_refused(model):
    with (
        pytest.raises(ValueError, match=r"loss_reduction must be one of .* got 'max'"),
        dome.sample_gradients(model, loss_reduction="max"),
    ):
        pass
