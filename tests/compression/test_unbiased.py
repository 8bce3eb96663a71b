from functools import cache

import pytest
import torch
from compressors import COMPRESSORS, named

UNBIASED = pytest.mark.parametrize("name", named(is_unbiased=True))
NUM_DRAWS = 600
# Two-sided, 24 entries and as many variances at 5.7 standard errors: a false alarm once
# in a million runs.
SIGMAS = 5.7
G = torch.linspace(-1.5, 2.0, 24, dtype=torch.float64)
G[3], G[7] = 5.0, 0.0


@cache
def draws(name):
    compressor = COMPRESSORS[name](len(G))
    if name == "gaussian":  # whose calls have tests of their own
        trips = [compressor.decode(compressor.encode(G)) for _ in range(NUM_DRAWS)]
    else:
        trips = [compressor(G) for _ in range(NUM_DRAWS)]
    return compressor, torch.stack(trips)


@UNBIASED
def test_the_mean_is_the_vector(name):
    _, c = draws(name)
    error = SIGMAS * c.std(dim=0) / NUM_DRAWS**0.5
    # Entries that hardly vary are off by the rounding of what is sent as float32.
    assert ((c.mean(dim=0) - G).abs() <= error + 1e-6).all()


@UNBIASED
def test_the_error_is_within_the_stated_variance(name):
    compressor, c = draws(name)
    errors = (c - G).square().sum(dim=1) / G.dot(G)
    omega = compressor.variance(len(G))
    uncertainty = SIGMAS * errors.std() / NUM_DRAWS**0.5
    assert errors.mean() <= omega + uncertainty
    if compressor.is_linear:  # the sketches' formulas are exact
        assert errors.mean() >= omega - uncertainty


@UNBIASED
def test_steps_draw_different_noise(name):
    _, c = draws(name)
    assert not torch.equal(c[0], c[1])
