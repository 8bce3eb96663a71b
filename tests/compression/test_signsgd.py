import pytest
import torch
from compression_twins import bits_of, signsgd

from dome.compression import SignSGD
from dome.compression.message import FRONT_BYTES


@pytest.mark.parametrize("dim", [1, 8, 9])
def test_signs_and_the_mean_magnitude_arrive(dim, rng):
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    # The scale travels as float32.
    torch.testing.assert_close(SignSGD()(g), signsgd(g), rtol=1e-6, atol=0)


def test_signs_lie_eight_a_byte_behind_the_scale(rng):
    g = torch.randn(20, generator=rng)
    message = SignSGD().encode(g)
    assert message.num_bits == 8 * (FRONT_BYTES + 4 + 3)
    assert bits_of(message.body[4:])[:20] == [int(x < 0) for x in g]


def test_half_of_the_norm_arrives_of_gaussian_entries(rng):
    g = torch.randn(100_000, generator=rng)
    error = (SignSGD()(g) - g).square().sum() / g.square().sum()
    assert float(error) == pytest.approx(1 - 2 / torch.pi, abs=0.01)


def test_signs_of_the_largest_numbers_are_finite():
    g = torch.tensor([3e38, -3e38, 3e38])
    assert torch.equal(SignSGD()(g), g)
