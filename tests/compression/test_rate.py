import pytest
import torch

from dome.compression import GaussianSketch, HadamardSketch, RandomK, TopK

KINDS = pytest.mark.parametrize("kind", [GaussianSketch, HadamardSketch, RandomK, TopK])


@KINDS
def test_a_rate_below_one_or_not_finite_is_refused(kind):
    for rate in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate must be a number of at least 1"):
            kind(rate)


@KINDS
def test_a_rate_above_the_dimension_is_refused(kind):
    compressor = kind(11)
    for use in (compressor, compressor.encode, lambda g: compressor.num_bits(len(g))):
        with pytest.raises(ValueError, match="at most the number of parameters 10"):
            use(torch.zeros(10))


@KINDS
def test_an_unknown_dtype_of_values_is_refused(kind):
    with pytest.raises(ValueError, match="value_dtype must be one of"):
        kind(2, value_dtype=torch.int32)


@KINDS
def test_bfloat16_halves_the_values(kind, rng):
    g = torch.randn(1000, generator=rng)
    single, half = kind(10.0), kind(10.0, value_dtype=torch.bfloat16)
    assert single.num_bits(1000) - half.num_bits(1000) == 100 * 16
    near, exact = half.decode(half.encode(g)), single.decode(single.encode(g))
    # Every number sent is off by at most 2⁻⁹ of itself.
    assert (near - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.parametrize("kind", [HadamardSketch, RandomK, TopK])
def test_at_rate_one_everything_arrives(kind, rng):
    g = torch.randn(64, generator=rng)
    # The Hadamard transform and its inverse round.
    torch.testing.assert_close(kind(1.0)(g), g, rtol=1e-5, atol=1e-6)


@KINDS
def test_a_rate_of_10_and_of_10_point_0_are_the_same(kind, rng):
    message = kind(10).encode(torch.randn(100, generator=rng))
    assert kind(10.0).decode(message).shape == (100,)
