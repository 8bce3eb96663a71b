import math

import pytest
import torch
from scipy.stats import kstest

import dome.privacy.releases as source
from dome.privacy import Clip, GaussianNoise
from dome.privacy.releases import Randomness

COUNT = 200_001


def test_secure_noise_is_normal():
    noise = Randomness().gaussian((COUNT,), 1.0)
    # A true sample falls below this p-value once in a million runs.
    assert kstest(noise.numpy(), "norm").pvalue > 1e-6
    assert noise.dtype == torch.float64
    neighbours = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]
    halves = torch.corrcoef(noise[: COUNT - 1].view(2, -1))[0, 1]
    assert max(abs(neighbours), abs(halves)) < 5 / math.sqrt(COUNT / 2)


def test_secure_uniform_numbers_are_uniform():
    numbers = Randomness().uniform(COUNT)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-6


def test_extreme_bits_give_finite_noise(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(source.os, "urandom", lambda n, byte=byte: n * byte)
        assert Randomness().gaussian((4,), 1.0).isfinite().all()


def test_seeds_that_the_program_sets_do_not_reach_secure_noise():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(Randomness().gaussian((5,), 1.0))
    assert not torch.equal(*draws)
    before = torch.get_rng_state()
    Randomness().gaussian((5,), 1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_makes_noise_reproducible():
    first, second = (
        Randomness(torch.Generator().manual_seed(3)).gaussian((2, 3), 2.0)
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.shape == (2, 3)


def test_a_branch_does_not_depend_on_what_is_drawn_beside_it():
    first, second = (Randomness(torch.Generator().manual_seed(3)) for _ in range(2))
    branches = [first.branch(), second.branch()]
    branches[0].uniform(7)
    assert torch.equal(first.gaussian((4,), 1.0), second.gaussian((4,), 1.0))


def test_no_numbers_can_be_asked_for():
    assert Randomness().gaussian((0, 3), 1.0).shape == (0, 3)
    assert Randomness().uniform(0).shape == (0,)


def test_clip_shortens_and_never_lengthens(rng):
    g = torch.randn(50, generator=rng, dtype=torch.float64)
    assert Clip(0.3)(g).norm() == pytest.approx(0.3)
    torch.testing.assert_close(Clip(0.3)(g), 0.3 * g / g.norm())
    assert torch.equal(Clip(100.0)(g), g)
    assert torch.equal(Clip(1.0)(torch.zeros(3)), torch.zeros(3))


def test_gaussian_noise_has_its_spread_and_keeps_the_type():
    noise = GaussianNoise(2.0)(torch.zeros(COUNT))
    assert noise.dtype == torch.float32
    assert noise.std() == pytest.approx(2.0, rel=0.01)
    seeded = [
        GaussianNoise(1, generator=torch.Generator().manual_seed(1)) for _ in "ab"
    ]
    g = torch.ones(4)
    assert torch.equal(seeded[0](g), seeded[1](g))
    assert torch.equal(GaussianNoise(0.0)(g), g)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_stages_are_refused(value):
    with pytest.raises(ValueError, match="max_norm must be a positive"):
        Clip(value)
    if value != 0:
        with pytest.raises(ValueError, match="std must be a number of at least 0"):
            GaussianNoise(value)
