import pytest
import torch

from dome.compression import RandomK
from dome.compression.noise import generator_of, random_signs, random_subset

# Statistics below fail by chance once in a million runs.
FALSE_ALARM = 1e-6


def numbers(*name):
    return torch.rand(4, generator=generator_of(*name))


def test_numbers_are_drawn_again_from_seed_step_and_worker():
    assert torch.equal(numbers(3, 1), numbers(3, 1))
    for other in ((3, 0), (4, 1), (3, 1, 1)):
        assert not torch.equal(numbers(*other), numbers(3, 1))


def test_a_negative_seed_and_a_foreign_state_are_refused():
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        RandomK(2.0, seed=-1)
    with pytest.raises(ValueError, match=r"it has no 'step', only \['basis'\]"):
        RandomK(2.0).load_state_dict({"basis": torch.zeros(1)})


@pytest.mark.parametrize("count", [1, 64, 65])
def test_signs_have_the_asked_number_and_dtype(count, rng):
    signs = random_signs(count, rng, torch.zeros(1, dtype=torch.float64))
    assert signs.shape == (count,)
    assert signs.dtype == torch.float64
    assert set(signs.tolist()) <= {-1.0, 1.0}


def test_every_sign_is_fair_and_independent_of_its_neighbours(rng):
    stats = pytest.importorskip("scipy.stats")
    signs = random_signs(64 * 20_000, rng, torch.zeros(1)).view(20_000, 64)
    positive = (signs > 0).sum(dim=0).double()
    chi2 = ((positive - 10_000).square() / 5_000).sum()
    assert stats.chi2.sf(chi2, 64) > FALSE_ALARM
    agree = (signs[:, 1:] * signs[:, :-1] > 0).sum(dim=0).double()
    chi2 = ((agree - 10_000).square() / 5_000).sum()
    assert stats.chi2.sf(chi2, 63) > FALSE_ALARM


@pytest.mark.parametrize(
    ("total", "count"), [(1, 1), (5, 1), (5, 4), (5, 5), (100, 50), (1000, 999)]
)
def test_a_subset_has_the_asked_number_of_different_indices(total, count, rng):
    subset = random_subset(total, count, rng)
    assert subset.shape == (count,)
    assert (subset.diff() > 0).all()
    assert 0 <= subset[0] <= subset[-1] < total


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_subset_is_equally_likely(count, rng):
    stats = pytest.importorskip("scipy.stats")
    num_draws, seen = 1500, {}
    for _ in range(num_draws):
        subset = tuple(random_subset(6, count, rng).tolist())
        seen[subset] = seen.get(subset, 0) + 1
    num_subsets = {2: 15, 3: 20, 4: 15}[count]
    counts = list(seen.values()) + [0] * (num_subsets - len(seen))
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
