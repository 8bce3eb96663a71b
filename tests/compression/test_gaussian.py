import pytest
import torch
from reference import gaussian_sketch

from dome.compression import GaussianSketch

NUM_DRAWS = 40_000


def draws(sketch, g, num=NUM_DRAWS):
    return torch.stack([sketch(g) for _ in range(num)])


@pytest.mark.parametrize("rate", [1.0, 2.5, 10.0])
def test_mean_and_covariance_are_those_of_the_explicit_sketch(rate, rng):
    g = torch.tensor([3.0, -1.0, 0.5, 2.0, 0.0, 1.0, -2.0, 0.1, 4.0, 1.0]).double()
    m = round(10 / rate)
    c = draws(GaussianSketch(rate, generator=rng), g)
    covariance = (g.square().sum() * torch.eye(10) + torch.outer(g, g)) / m
    # Five standard errors, each entry: a false alarm once in 10,000 runs of this test.
    error = 5 * (covariance.diagonal() / NUM_DRAWS).sqrt()
    assert ((c.mean(dim=0) - g).abs() < error).all()
    # Fourth moments of these products are at most about 15 times the squared scale.
    scale = torch.outer(covariance.diagonal(), covariance.diagonal()).sqrt()
    spread = 5 * scale * (15 / NUM_DRAWS) ** 0.5
    assert ((torch.cov(c.T) - covariance).abs() < spread).all()


def test_the_distribution_is_that_of_the_explicit_sketch(rng):
    g = torch.tensor([3.0, -1.0, 0.5, 2.0]).double()
    ours = draws(GaussianSketch(2.0, generator=rng), g, 4000)
    theirs = torch.stack([gaussian_sketch(g, 2, rng) for _ in range(4000)])
    stats = pytest.importorskip("scipy.stats")
    for direction in (g, torch.tensor([1.0, 3.0, 0.0, 0.0]).double()):
        result = stats.ks_2samp(ours @ direction, theirs @ direction)
        assert result.pvalue > 1e-4  # the false-alarm rate of this test
    result = stats.ks_2samp(ours.norm(dim=1), theirs.norm(dim=1))
    assert result.pvalue > 1e-4


def test_encoding_and_decoding_is_a_linear_sketch_of_the_stated_size(rng):
    g = torch.randn(20_000, generator=rng)
    sketch = GaussianSketch(100.0, generator=rng)
    message = sketch.encode(g)
    assert message.values.shape == (200,)
    assert message.num_bits == 200 * 32 + 64
    recovered = sketch.decode(message)
    again = sketch.decode(message)
    assert torch.equal(recovered, again)
    # g'R'Rg = |Rg|^2: both sides drew the same R.
    torch.testing.assert_close(recovered.dot(g), message.values.square().sum())


def test_a_message_of_another_size_is_refused(rng):
    message = GaussianSketch(4.0).encode(torch.randn(40, generator=rng))
    with pytest.raises(
        ValueError, match=r"has 20 values, this message has shape \(10,\)"
    ):
        GaussianSketch(2.0).decode(message)


def test_a_zero_gradient_stays_zero():
    assert not GaussianSketch(3.0)(torch.zeros(9)).any()


@pytest.mark.parametrize("rate", [0.5, -1.0, float("nan"), float("inf")])
def test_a_rate_below_one_or_not_finite_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be a number of at least 1"):
        GaussianSketch(rate)


def test_a_rate_above_the_number_of_parameters_and_a_matrix_are_refused():
    with pytest.raises(ValueError, match="at most the number of parameters 10"):
        GaussianSketch(11)(torch.zeros(10))
    with pytest.raises(
        ValueError, match=r"a gradient is a vector \(D,\), got \(2, 5\)"
    ):
        GaussianSketch(2)(torch.zeros(2, 5))


def test_noise_resumes_from_the_saved_state(rng):
    g = torch.randn(50, generator=rng)
    sketch = GaussianSketch(5.0)
    sketch(g)
    saved = sketch.state_dict()
    expected = sketch(g)
    resumed = GaussianSketch(5.0)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed(g), expected)


def test_the_global_generator_is_neither_read_nor_advanced():
    state = torch.random.get_rng_state()
    first = GaussianSketch(5.0)(torch.ones(50))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, GaussianSketch(5.0)(torch.ones(50)))


def test_a_state_saved_before_any_use_starts_the_noise_again():
    sketch = GaussianSketch(5.0)
    start = sketch.state_dict()
    first = sketch(torch.ones(50))
    sketch.load_state_dict(start)
    assert torch.equal(sketch(torch.ones(50)), first)
