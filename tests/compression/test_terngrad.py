import pytest
import torch
from compression_twins import terngrad, trits_of

from dome.compression import TernGrad
from dome.compression.message import FRONT_BYTES
from dome.compression.noise import DEFAULT_SEED, generator_of


@pytest.mark.parametrize(("dim", "bucket_size"), [(1, 512), (16, 1), (50, 16)])
def test_digits_are_those_of_the_entry_by_entry_loop(dim, bucket_size, rng):
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    g[dim // 2] = 0.0
    uniforms = torch.empty(-(-dim // bucket_size) * bucket_size, dtype=torch.float64)
    uniforms.uniform_(generator=generator_of(DEFAULT_SEED, 0))
    expected = terngrad(g, bucket_size, uniforms)
    received = TernGrad(bucket_size=bucket_size)(g)
    # The maxima travel as float32.
    torch.testing.assert_close(received, expected, rtol=1e-6, atol=1e-12)


def test_five_entries_take_a_byte(rng):
    g = torch.randn(1000, generator=rng)
    compressor = TernGrad(bucket_size=100)
    message = compressor.encode(g)
    assert message.num_bits == 8 * (FRONT_BYTES + 10 * 4 + 200)
    signs = compressor.decode(message).sign() + 1
    assert trits_of(message.body[40:], 1000) == signs.tolist()


def test_the_largest_entry_of_a_bucket_always_arrives(rng):
    g = torch.randn(64, generator=rng)
    compressor = TernGrad(bucket_size=16)
    largest = g.view(4, 16).abs().argmax(dim=1) + torch.arange(0, 64, 16)
    for _ in range(50):
        assert torch.equal(compressor(g)[largest], g[largest])


def test_the_variance_bound_is_reached_by_the_worst_bucket():
    compressor, S = TernGrad(bucket_size=16), 16
    # One entry of 1 and the others a: m ‖x‖₁/‖x‖² is largest for a = 1/(1 + √S).
    g = torch.full((S,), 1 / (1 + S**0.5), dtype=torch.float64)
    g[0] = 1.0
    exact = (g.sum() * g.max() - g.dot(g)) / g.dot(g)
    assert float(exact) == pytest.approx(compressor.variance(S))
    assert compressor.variance(8) < compressor.variance(S) == compressor.variance(99)


def test_workers_round_differently(rng):
    g = torch.randn(100, generator=rng)
    one, other = TernGrad(), TernGrad()
    other.set_worker(1)
    assert not torch.equal(one(g), other(g))
