import math

import pytest
import torch
from models import batches, small_classifier
from reference import fraction, projector
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import SignalToNoise, captured_fraction, signal_to_noise

# Each statistical test compares a mean over many independent batches with the truth, in
# units of its own standard error, which a normal distribution exceeds by this much once
# in 15,787 times. Seeds are fixed: what passes once passes always.
LIMIT = 4.0
NUM_BATCHES = 4000


def z_score(values, truth):
    values = torch.tensor(values, dtype=torch.float64)
    return float((values.mean() - truth) / (values.std() / len(values) ** 0.5))


def made(rng, mean_length, num_samples, dim=6):
    """Batches (N, B, D) of skewed samples, with known mean and covariance."""
    scales = torch.linspace(0.2, 2.0, dim, dtype=torch.float64)
    shape = (NUM_BATCHES, num_samples, dim)
    # Exponential minus one: mean 0, variance 1, far from normal.
    noise = -torch.rand(shape, generator=rng, dtype=torch.float64).log() - 1
    mean = torch.zeros(dim, dtype=torch.float64)
    mean[0] = mean_length
    return noise * scales + mean, mean, scales.square()


@pytest.mark.parametrize(("mean_length", "num_samples"), [(0.0, 2), (3.0, 2), (0.3, 8)])
def test_signal_and_noise_are_unbiased(rng, mean_length, num_samples):
    stream, mean, variance = made(rng, mean_length, num_samples)
    found = [signal_to_noise(batch) for batch in stream]
    signal, noise = mean.square().sum(), variance.sum() / num_samples
    assert abs(z_score([f.signal for f in found], signal)) < LIMIT
    assert abs(z_score([f.noise for f in found], noise)) < LIMIT


def test_what_is_left_outside_a_basis_is_unbiased_too(rng):
    stream, mean, variance = made(rng, 0.3, 8)
    basis = torch.eye(6, dtype=torch.float64)[:, 4:]
    found = [signal_to_noise(batch, basis) for batch in stream]
    assert abs(z_score([f.signal for f in found], mean[:4].square().sum())) < LIMIT
    assert abs(z_score([f.noise for f in found], variance[:4].sum() / 8)) < LIMIT


def test_the_squared_norm_of_the_batch_gradient_alone_would_be_found_out(rng):
    stream, mean, _ = made(rng, 0.3, 8)
    lengths = stream.mean(dim=1).square().sum(dim=1).tolist()
    assert z_score(lengths, mean.square().sum()) > 2 * LIMIT


def test_signal_is_the_true_ratio_times_the_noise_on_average(rng):
    stream, mean, variance = made(rng, 0.6, 8)
    ratio = float(mean.square().sum() / (variance.sum() / 8))
    found = [signal_to_noise(batch) for batch in stream]
    assert abs(z_score([f.signal - ratio * f.noise for f in found], 0.0)) < LIMIT


def test_the_formula_is_the_literal_one(rng):
    G = torch.randn(7, 5, generator=rng, dtype=torch.float64) + 1
    trace = torch.cov(G.T).trace()
    found = signal_to_noise(G)
    assert found.noise == pytest.approx(float(trace / 7))
    expected = G.mean(dim=0).square().sum() - trace / 7
    assert found.signal == pytest.approx(float(expected))
    assert found.ratio == pytest.approx(float(expected / (trace / 7)))


def test_samples_that_agree_have_no_noise():
    assert signal_to_noise(torch.ones(3, 4)).ratio == math.inf
    assert math.isnan(signal_to_noise(torch.zeros(3, 4)).ratio)
    assert SignalToNoise(-1.0, 2.0).ratio == -0.5


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match=r"at least two samples .* got shape \(1, 4\)"):
        signal_to_noise(torch.ones(1, 4))


@pytest.mark.parametrize("layout", ["global", "layerwise"])
@pytest.mark.parametrize("tracker", ["power", "svd"])
@pytest.mark.parametrize("size", [4, 30])
def test_stats_have_what_explicit_projections_give(rng, layout, tracker, size):
    model = small_classifier()
    options = {"layout": layout, "tracker": tracker, "basis_dtype": torch.float64}
    grad_filter = dome.GradientFilter(model, 3, **options)
    seen = []
    for x, y in batches(rng, 4, size):
        G = dome.per_sample_gradients(model, cross_entropy, x, y)
        blocks = [projector(t.basis) for t in grad_filter.trackers.values()]
        # What the filter had before this batch turned it.
        seen.append((G, G - G @ torch.block_diag(*blocks)))
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
    stats = grad_filter.stats
    # The first batch is removed with a basis of its own alone.
    before, after = (averaged(rows) for rows in zip(*seen[1:], strict=True))
    assert stats.signal == pytest.approx(before.signal, rel=1e-6)
    assert stats.noise == pytest.approx(before.noise, rel=1e-6)
    assert stats.signal_to_noise == pytest.approx(before.ratio, rel=1e-6)
    assert stats.signal_to_noise_after == pytest.approx(after.ratio, rel=1e-6)
    blocks = [projector(t.basis) for t in grad_filter.trackers.values()]
    removed = (G @ torch.block_diag(*blocks)).mean(dim=0).square().sum()
    share = removed / G.mean(dim=0).square().sum()
    assert stats.removed_share == pytest.approx(float(share))
    assert stats.removed_share == 1 - stats.kept_norm**2


def averaged(batches):
    """Signal and noise, each averaged; a batch weighs 0.99 of the one after it."""
    found = [signal_to_noise(rows) for rows in batches]
    weights = [0.99 ** (len(found) - i) for i in range(len(found))]
    signal = sum(w * f.signal for w, f in zip(weights, found, strict=True))
    noise = sum(w * f.noise for w, f in zip(weights, found, strict=True))
    return SignalToNoise(signal / sum(weights), noise / sum(weights))


def test_stats_before_the_first_sample_have_no_signal():
    stats = dome.GradientFilter(small_classifier(), 3).stats
    assert math.isnan(stats.signal)
    assert math.isnan(stats.noise)
    assert math.isnan(stats.signal_to_noise)
    assert math.isnan(stats.signal_to_noise_after)
    assert stats.removed_share == 0


def test_captured_fraction_is_the_papers_with_explicit_projections(rng):
    G = torch.randn(7, 20, generator=rng, dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(20, 3, generator=rng, dtype=torch.float64)).Q
    torch.testing.assert_close(captured_fraction(U, G), fraction(U, G))
    with_zero = torch.cat([G, torch.zeros(7, 20).double()])
    torch.testing.assert_close(captured_fraction(U, with_zero), fraction(U, G) / 2)


def test_captured_fraction_tells_its_arguments_apart(rng):
    G = torch.randn(7, 20, generator=rng, dtype=torch.float64)
    U = torch.eye(20, dtype=torch.float64)[:, :3]
    with pytest.raises(ValueError, match=r"basis \(D, K\) .*\(7, 20\) and \(20, 3\)"):
        captured_fraction(G, U)
    captured, total = (G @ U).square().sum(1), G.square().sum(1)
    with pytest.deprecated_call(match=r"takes \(basis, samples\) now"):
        old = captured_fraction(captured, total)
    torch.testing.assert_close(old, captured_fraction(U, G))


def trained(rng, num_steps, rank, size, **options):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank, **options)
    for x, y in batches(rng, num_steps, size):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
    return grad_filter


@pytest.mark.parametrize("options", [{}, {"direction_rank": 2}, {"warmup": 5}])
def test_removing_random_directions_is_said_once(rng, options):
    first = 20 + options.get("warmup", 0)
    words = r"after 20 filtered steps, samples have determined \d+ of 60 directions"
    with pytest.warns(RuntimeWarning, match=words) as warned:
        trained(rng, first + 30, 60, 2, **options)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"size": 12},  # directions are known in time
        {"rank": 8},
        {"tracker": "svd"},  # what is not known is not removed
        {"strength": 0.0},
    ],
)
def test_no_random_directions_no_warning(rng, options):
    chosen = {"rank": 60, "num_steps": 25, "size": 2} | options
    # A warning is an error in these tests.
    assert trained(rng, **chosen).stats.step == 25
