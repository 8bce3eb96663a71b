import pytest
import torch
from reference import gaussian_sketch

from dome.compression import GaussianSketch, gaussian
from dome.compression.message import FRONT_BYTES
from dome.compression.noise import DEFAULT_SEED, generator_of

NUM_DRAWS = 2000


def draws(sketch, g, num=NUM_DRAWS):
    return torch.stack([sketch(g) for _ in range(num)])


@pytest.mark.parametrize("rate", [1.0, 10.0])
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
    ours = draws(GaussianSketch(2.0, generator=rng), g, 600)
    theirs = torch.stack([gaussian_sketch(g, 2, rng) for _ in range(600)])
    stats = pytest.importorskip("scipy.stats")
    for direction in (g, torch.tensor([1.0, 3.0, 0.0, 0.0]).double()):
        result = stats.ks_2samp(ours @ direction, theirs @ direction)
        assert result.pvalue > 1e-4  # the false-alarm rate of this test
    result = stats.ks_2samp(ours.norm(dim=1), theirs.norm(dim=1))
    assert result.pvalue > 1e-4


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (20, 5), (300, 300)])
def test_a_message_is_the_explicit_sketch_of_its_step(dim, size, rng):
    sketch = GaussianSketch(dim / size, value_dtype=torch.float64)
    for step in range(2):
        g = torch.randn(dim, generator=rng, dtype=torch.float64)
        random = generator_of(DEFAULT_SEED, step)
        R = torch.randn(dim, size, generator=random, dtype=torch.float64).T / size**0.5
        message = sketch.encode(g)
        torch.testing.assert_close(message.numbers[:size], R @ g)
        torch.testing.assert_close(sketch.decode(message), R.T @ (R @ g))


def test_encoding_and_decoding_draw_the_same_blocks(rng):
    g = torch.randn(20_000, generator=rng)
    sketch = GaussianSketch(100.0)
    message = sketch.encode(g)
    assert message.num_bits == 200 * 32 + 8 * FRONT_BYTES
    # g'R'Rg = |Rg|^2: both sides drew the same R, in several blocks.
    assert gaussian.BLOCK_NUMBERS < 20_000 * 200
    recovered = sketch.decode(message)
    sent = message.numbers[:200]
    torch.testing.assert_close(recovered.dot(g), sent.square().sum())


def test_no_more_than_a_block_of_the_matrix_exists_at_a_time(monkeypatch):
    monkeypatch.setattr(gaussian, "BLOCK_NUMBERS", 30)
    shapes = []
    real = torch.randn

    def seen(*shape, **options):
        shapes.append(shape)
        return real(*shape, **options)

    monkeypatch.setattr(torch, "randn", seen)
    GaussianSketch(10.0).encode(torch.ones(70))
    assert shapes == [(4, 7)] * 17 + [(2, 7)]


def test_messages_and_calls_have_the_same_distribution(rng):
    stats = pytest.importorskip("scipy.stats")
    g = torch.tensor([3.0, -1.0, 0.5, 2.0]).double()
    sketch = GaussianSketch(2.0, generator=rng)
    called = draws(sketch, g, 600)
    sent = torch.stack([sketch.decode(sketch.encode(g)) for _ in range(600)])
    for direction in (g, torch.tensor([1.0, 3.0, 0.0, 0.0]).double()):
        result = stats.ks_2samp(called @ direction, sent @ direction)
        assert result.pvalue > 1e-6  # the false-alarm rate of this test


def test_a_call_passes_on_what_is_not_finite_for_the_user_to_see():
    assert GaussianSketch(3.0)(torch.full((9,), torch.nan)).isnan().all()


@pytest.mark.parametrize("size", [2.0**-120, 2.0**100])
def test_a_call_draws_the_same_whatever_the_size_of_the_gradient(size, rng):
    g = torch.randn(50, generator=rng)
    expected = GaussianSketch(5.0)(g)
    # By a power of two, so that not even rounding differs; squares of these entries
    # would be 0 or infinite.
    assert torch.equal(GaussianSketch(5.0)(size * g) / size, expected)


def test_a_generator_of_the_user_s_goes_on_with_a_state_that_has_none(rng):
    sketch, given = GaussianSketch(5.0, generator=rng), rng.get_state()
    sketch.load_state_dict({"step": torch.tensor(3)})
    assert torch.equal(rng.get_state(), given)
    assert sketch.state_dict()["step"] == 3


def test_a_sketch_that_was_used_goes_back_to_a_saved_state(rng):
    g, sketch = torch.randn(50, generator=rng), GaussianSketch(5.0)
    sketch(g)
    saved = sketch.state_dict()
    expected = sketch(g)
    sketch.load_state_dict(saved)
    assert torch.equal(sketch(g), expected)


def test_a_state_that_was_loaded_and_not_used_is_saved_again():
    saved = {"step": torch.tensor(2), "generator": torch.Generator().get_state()}
    sketch = GaussianSketch(5.0)
    sketch.load_state_dict(saved)
    again = sketch.state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], saved[key]) for key in saved)


def test_the_state_of_another_kind_of_generator_is_refused(rng):
    sketch = GaussianSketch(5.0, generator=rng)
    with pytest.raises(ValueError, match="was not drawn on cpu, and other kinds of"):
        sketch.load_state_dict({"generator": torch.zeros(16, dtype=torch.uint8)})


def test_a_state_from_before_steps_were_counted_loads():
    sketch = GaussianSketch(5.0)
    sketch.encode(torch.ones(50))
    sketch.load_state_dict({"generator": torch.Generator().get_state()})
    assert sketch.state_dict()["step"] == 0
