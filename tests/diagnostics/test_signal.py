import math

import pytest
import torch
from models import batches, small_classifier
from reference import center, fraction, projector
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
    for x, y in batches(rng, 4, size):
        G = dome.per_sample_gradients(model, cross_entropy, x, y)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
    blocks = [projector(t.basis) for t in grad_filter.trackers.values()]
    left = G - G @ torch.block_diag(*blocks)
    for rows, found in (
        (G, grad_filter.stats.signal_to_noise),
        (left, grad_filter.stats.signal_to_noise_after),
    ):
        noise = center(rows).square().sum() / (size * (size - 1))
        signal = rows.mean(dim=0).square().sum() - noise
        assert found == pytest.approx(float(signal / noise), rel=1e-6)
    kept = grad_filter.stats.kept_norm
    removed = (G - left).mean(dim=0).square().sum() / G.mean(dim=0).square().sum()
    assert grad_filter.stats.removed_share == pytest.approx(float(removed))
    assert grad_filter.stats.removed_share == 1 - kept**2


def test_stats_before_the_first_sample_have_no_signal():
    stats = dome.GradientFilter(small_classifier(), 3).stats
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
