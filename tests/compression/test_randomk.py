import pytest
import torch
from compression_twins import randomk

from dome.compression import RandomK
from dome.compression.message import FRONT_BYTES
from dome.compression.noise import DEFAULT_SEED, generator_of, random_subset


@pytest.mark.parametrize(("dim", "k"), [(1, 1), (12, 3), (12, 9), (100, 7)])
def test_randomk_is_the_scaled_choice_of_its_step(dim, k, rng):
    compressor = RandomK(dim / k, value_dtype=torch.float64)
    for step in range(3):
        g = torch.randn(dim, generator=rng, dtype=torch.float64)
        chosen = random_subset(dim, k, generator_of(DEFAULT_SEED, step))
        torch.testing.assert_close(compressor(g), randomk(g, chosen.tolist()))


def test_randomk_sends_values_alone(rng):
    g = torch.randn(1000, generator=rng)
    message = RandomK(100.0).encode(g)
    assert message.num_bits == 8 * (FRONT_BYTES + 10 * 4)
    assert RandomK(100.0).decode(message).count_nonzero() == 10
