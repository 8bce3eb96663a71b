from dataclasses import replace

import pytest
import torch
from torch import nn

from dome.parameters import Layout
from dome_lab.paper.arms import make_compressor, times_fewer_bits
from dome_lab.paper.run import COMPRESSORS, Run

RUN = Run(task="", model="", seed=3, batch_size=8, epochs=1, rate=15)


@pytest.fixture
def layout():
    return Layout(nn.Sequential(nn.Linear(100, 60), nn.Linear(60, 40)))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_sends_what_the_rate_allows(name, layout, rng):
    compressor = make_compressor(replace(RUN, compressor=name), layout)
    # A message ends with a whole number: 64 bits of 17,000.
    assert times_fewer_bits(compressor, layout.dim) >= 15 * (1 - 64 / 17_000)
    vector = torch.randn(layout.dim, generator=rng)
    assert compressor(vector).shape == vector.shape


def test_of_those_that_fit_the_largest_is_taken(layout):
    fine = make_compressor(replace(RUN, compressor="qsgd", rate=5), layout)
    assert fine.num_levels == 31  # six bits an entry, of 32/5
    assert make_compressor(replace(RUN, compressor="qsgd"), layout).num_levels == 1


def test_both_arms_of_a_seed_get_the_same_noise_and_seeds_another(layout, rng):
    vector = torch.randn(layout.dim, generator=rng)
    run = replace(RUN, compressor="randomk")
    first, same = (make_compressor(run, layout)(vector) for _ in range(2))
    other = make_compressor(replace(run, seed=4), layout)(vector)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_rate_that_a_compressor_cannot_reach_is_refused_with_one_it_can(layout):
    run = replace(RUN, compressor="terngrad", rate=100)
    with pytest.raises(ValueError, match=r"TernGrad.*a rate of at most 1[89]\.\d"):
        make_compressor(run, layout)


def test_without_a_rate_nothing_is_compressed(layout):
    assert make_compressor(replace(RUN, rate=None), layout) is None
