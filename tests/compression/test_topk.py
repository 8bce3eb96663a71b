import pytest
import torch
from compression_twins import integers_in_planes, topk

from dome.compression import TopK
from dome.compression.message import FRONT_BYTES


@pytest.mark.parametrize(
    ("dim", "rate"), [(1, 1.0), (5, 3.0), (100, 1.0), (100, 70.0), (5000, 70.0)]
)
def test_topk_keeps_the_largest_magnitudes(dim, rate, rng):
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    compressor = TopK(rate, value_dtype=torch.float64)
    assert torch.equal(compressor(g), topk(g, max(1, round(dim / rate))))


def test_topk_finds_the_largest_where_a_sample_misleads(rng):
    g = torch.rand(6400, generator=rng)
    g[::64] += 10  # what the sample sees is all large
    assert torch.equal(TopK(10.0)(g), topk(g, 640))
    g = torch.rand(6400, generator=rng)
    g[::64] = 0
    assert torch.equal(TopK(10.0)(g), topk(g, 640))


def test_topk_of_equal_entries_keeps_the_asked_number():
    assert TopK(10.0)(torch.ones(5000)).count_nonzero() == 500
    assert TopK(10.0)(torch.zeros(5000)).count_nonzero() == 0


def test_a_topk_message_is_values_and_indices_of_the_fewest_bits(rng):
    g = torch.randn(1000, generator=rng)
    message = TopK(100.0).encode(g)
    assert message.num_bits == 8 * (FRONT_BYTES + 10 * 4 + 13)  # 10 indices, 10 bits
    indices = integers_in_planes(message.body[40:], 10, 10)
    assert indices == sorted(g.abs().topk(10).indices.tolist())
    assert torch.equal(message.body[:40].clone().view(torch.float32), g[indices])
