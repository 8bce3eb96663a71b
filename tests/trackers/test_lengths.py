import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.store import factors
from dome.trackers import lengths
from dome.trackers.factors import FactorBatch, OneHot, Product, Use, Vectors
from dome.trackers.lengths import squared_lengths


class Words(nn.Module):
    """An embedding that is the head too, a map that is used twice, a convolution."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 12)
        self.twice = nn.Linear(12, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        h = self.twice(torch.tanh(self.twice(self.words(x))))
        h = self.norm(h + self.conv(h.mT).mT)
        return h.mean(1) @ self.words.weight.T


@pytest.mark.parametrize("at_once", [1, 1 << 22], ids=["one by one", "all at once"])
@pytest.mark.parametrize("num_positions", [1, 3, 40])
def test_lengths_of_factors_are_those_of_rows(rng, monkeypatch, num_positions, at_once):
    monkeypatch.setattr(factors, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(lengths, "NUMBERS_AT_ONCE", at_once)
    torch.manual_seed(0)
    model = Words().double()
    x = torch.randint(40, (5, num_positions), generator=rng)
    y = torch.randint(40, (5,), generator=rng)
    rows = dome.per_sample_gradients(model, cross_entropy, x, y, loss_reduction="sum")
    source = PerSample(model, Layout(model), direction_rank=1)
    cross_entropy(model(x), y).backward()
    batch = source.take_compact()
    kept = [u for uses in batch.uses.values() for u in uses]
    assert any(isinstance(use.grads, Product) for use in kept)
    torch.testing.assert_close(squared_lengths(batch), rows.square().sum(1))


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_squares_may_leave_the_range_of_float32(rng, scale):
    left, right = (torch.randn(4, 3, 9, generator=rng) for _ in range(2))
    rows = (left.double().mT @ right.double()).flatten(1)
    product = Product(Vectors(left * scale), Vectors(right))
    batch = FactorBatch(4, {0: [Use(slice(0, 4), product)]})
    found = squared_lengths(batch) / scale**2
    # Sums of nine products in float32.
    torch.testing.assert_close(found, rows.square().sum(1), rtol=1e-5, atol=0)


def test_samples_of_several_batches_stand_behind_each_other(rng):
    index = torch.randint(7, (3, 2), generator=rng)
    right = torch.randn(3, 2, 5, generator=rng, dtype=torch.float64)
    words = Product(OneHot(index, 7), Vectors(right))
    rows = torch.randn(2, 35, generator=rng, dtype=torch.float64)
    batch = FactorBatch(5, {0: [Use(slice(0, 3), words), Use(slice(3, 5), rows)]})
    expected = torch.cat([words.rows().flatten(1), rows]).square().sum(1)
    torch.testing.assert_close(squared_lengths(batch), expected)
