import math
import random

import pytest
import torch
from models import small_classifier
from reference import center, noise_scale
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dome
from dome.planning.suggestion import forecasts, interval
from dome.planning.watching import learned

DIM = 120
RANKS = (1, 5, 20, 40)


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    """Fewer of them, to be faster."""
    monkeypatch.setattr("dome.planning.suggestion.RANKS", RANKS)


class Dot(nn.Module):
    """The gradient of each sample's term of the loss is the sample itself."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, 1))

    def forward(self, x):
        return x @ self.weight


def mean_of(results):
    return results.mean()


def stream(rng, variances, num_batches=40, size=32, mean=0.0):
    """Batches of normal samples with these variances along random directions."""
    dim = len(variances)
    turned, _ = torch.linalg.qr(torch.randn(dim, dim, generator=rng))
    root = torch.as_tensor(variances).sqrt()
    return [
        (torch.randn(size, dim, generator=rng) * root) @ turned.T + mean
        for _ in range(num_batches)
    ]


def suggested(loader, **options):
    return dome.suggest(Dot(), mean_of, loader, **options)


def test_a_flat_spectrum_says_no(rng):
    found = suggested(stream(rng, torch.ones(DIM)))
    assert found.rank is None
    assert found.edge is None
    assert found.sentence.startswith("do not use dome here: nothing stands out")
    assert not found.forecasts
    assert str(found).endswith(found.sentence)


def test_a_flat_spectrum_says_no_with_few_samples(rng):
    found = suggested(stream(rng, torch.ones(DIM), num_batches=8, size=16))
    assert found.rank is None


@pytest.mark.parametrize("num_spikes", [1, 3, 10])
@pytest.mark.parametrize("height", [30.0, 300.0])
def test_spikes_are_found_to_within_one(rng, num_spikes, height):
    variances = torch.ones(DIM)
    variances[:num_spikes] = height * torch.linspace(2, 1, num_spikes)
    found = suggested(stream(rng, variances))
    assert abs(found.edge - num_spikes) <= 1
    assert found.rank in (found.edge, None)
    share = float(variances[:num_spikes].sum() / variances.sum())
    if share > 0.3:
        assert found.choice.share == pytest.approx(share, rel=0.1)
        assert f"{found.rank} directions stand out" in found.sentence


@pytest.mark.parametrize("power", [0.7, 1.0, 1.5])
def test_a_power_law_has_no_edge_and_gets_the_rank_of_the_budget(rng, power):
    batches = stream(rng, torch.arange(1, DIM + 1) ** -power)
    found = suggested(batches)
    assert found.edge is None
    assert found.rank == RANKS[-1]
    assert "no edge" in found.sentence
    # Four bytes a number: two batches of samples, and five bases.
    memory = 4 * DIM * (2 * 32 + 5 * 30)  # bytes
    assert max(c.rank for c in suggested(batches, memory=memory).candidates) == 30


def test_a_filter_that_saves_little_is_not_suggested(rng):
    variances = torch.ones(DIM)
    variances[0] = 8.0
    found = suggested(stream(rng, variances))
    assert found.edge == 1
    assert found.rank is None
    assert "is the least that is worth it" in found.sentence
    told = float(found.sentence.split("allow ")[1].split(" times")[0])
    assert 1 <= told < 1.1


@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_numbers_are_what_explicit_projections_give(rng, layout):
    model = small_classifier()
    x, y = torch.randn(80, 8, generator=rng).double(), torch.zeros(80, dtype=torch.long)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    found = dome.suggest(model, cross_entropy, batches)
    rows = [dome.per_sample_gradients(model, cross_entropy, *b) for b in batches]
    (c,) = [c for c in found.candidates if c.name == layout and c.rank == 5]
    # Learned with this very rank: the first columns do not depend on the others.
    tracker = learned(model, 35, layout, None)  # five batches of eight
    for G in rows[:5]:
        tracker.update(G)
    U = torch.block_diag(*(t.basis[:, :5] for _, t in tracker))
    P = U @ U.T
    spread = sum(center(G).square().sum() for G in rows[5:])
    inside = sum((center(G) @ P).square().sum() for G in rows[5:])
    assert c.share == pytest.approx(float(inside / spread))
    means = torch.stack([G.mean(0) for G in rows[5:]])
    kept = (means - means @ P).square().sum(1) / means.square().sum(1)
    assert c.kept_norm == pytest.approx(float(kept.mean()) ** 0.5)
    assert c.factor == pytest.approx(1 / float(kept.mean()))
    low, high = c.factor_interval
    assert low < c.factor < high
    assert found.num_learned == found.num_judged == 40
    unweighted = [noise_scale([G], [torch.eye(195).double()]) for G in rows[5:]]
    assert len(unweighted) == 5
    trace = spread / 35
    signal = means.square().sum(1).mean() - trace / 8
    assert found.noise_scale == pytest.approx(float(trace / signal))


def test_the_first_columns_are_those_of_a_smaller_rank(rng):
    model = small_classifier(torch.float64)
    for direction_rank in (None, 2):
        large, small = (learned(model, k, "global", direction_rank) for k in (6, 2))
        # The same start: the first columns of a larger one are drawn by another order.
        for _ in range(60):
            G = torch.randn(16, 195, generator=rng, dtype=torch.float64)
            G[:, :2] *= torch.tensor([30.0, 20.0], dtype=torch.float64)
            large.update(G)
            small.update(G)
        (_, a), (_, b) = *large, *small
        cosines = torch.linalg.svdvals(a.basis[:, :2].T @ b.basis)
        assert float(cosines.min()) > 0.95


def state_of(model, generator):
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return tensors, torch.get_rng_state(), random.getstate(), generator.get_state()


class Counting(nn.Module):
    """Dropout, a buffer that every call writes to, and one that it replaces."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = torch.full((), random.random())
        return self.body(x)


def test_nothing_is_changed(rng):
    model = Counting()
    data = TensorDataset(
        torch.randn(96, 8, generator=rng), torch.randint(3, (96,), generator=rng)
    )
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, 8, shuffle=True, generator=generator)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    buffers = dict(model.named_buffers())
    before = state_of(model, generator)
    dome.suggest(model, cross_entropy, loader)
    after = state_of(model, generator)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert torch.equal(after[1], before[1])
    assert after[2] == before[2]
    assert torch.equal(after[3], before[3])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_batches_are_given_as_to_verify(rng):
    model = small_classifier()
    x = torch.randn(48, 8, generator=rng).double()
    y = torch.randint(3, (48,), generator=rng)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, labels):
            return {"loss": cross_entropy(self.inner(x), labels)}

    pairs = list(zip(x.split(8), y.split(8), strict=True))
    named = [{"x": a, "labels": b} for a, b in pairs]
    one = dome.suggest(model, cross_entropy, pairs)
    other = dome.suggest(Named(), None, named)
    assert other.spectrum == pytest.approx(one.spectrum)


def test_it_can_be_printed_in_eighty_columns_and_drawn(rng, tmp_path):
    variances = torch.ones(DIM)
    variances[:3] = 1000.0
    found = suggested(stream(rng, variances))
    *table, sentence = str(found).splitlines()
    forecast = len(found.forecasts)
    assert all(len(line) <= 80 for line in table[1:-forecast])
    assert sentence == found.sentence
    found.draw().savefig(tmp_path / "suggestion.png")
    assert (tmp_path / "suggestion.png").stat().st_size > 10_000
    with pytest.raises(AttributeError):
        found.edge = 3


def test_forecasts_are_for_unbiased_compressors_alone():
    told = forecasts(8.0)
    assert told["GaussianSketch, HadamardSketch"] == "rate R → 8.0 R"
    assert told["RandomK"] == "rate R → 1 + 8.0 (R − 1)"
    assert "3.0 bits" in told["QSGD"]
    assert told["TopK, SignSGD, PowerSGD, ErrorFeedback"] == "biased: measure it"


def test_an_interval_is_students():
    x = torch.linspace(0.2, 0.4, 6)
    mean, low, high = interval(x.tolist())
    half = 2.5706 * float(x.double().std()) / math.sqrt(6)
    assert (mean, low, high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), rel=0.01)
    assert interval([0.0, 1.0])[1:] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (iter([torch.ones(4, DIM)]), {}, "whose batches would be missing in training"),
        (
            [torch.ones(4, DIM)] * 9,
            {"batches": 3},
            "at least 4, half to learn .* got 3",
        ),
        ([torch.ones(4, DIM)] * 9, {"memory": 0}, "memory must be at least 1 byte"),
        ([torch.ones(4, DIM)] * 9, {"memory": 3000}, "take .* and there are 3 kB"),
        ([torch.ones(4, DIM)] * 9, {}, "the samples of each batch are all the same"),
        ([torch.ones(1, DIM)] * 9, {}, "give more or larger batches"),
        ([torch.ones(8, DIM)] * 2, {}, "the loader ended with 0 batches"),
        ([torch.full((8, DIM), math.nan)] * 9, {}, "is not finite at the model's wei"),
    ],
)
def test_what_cannot_be_judged_is_refused(loader, options, message):
    with pytest.raises(ValueError, match=message):
        suggested(loader, **options)
