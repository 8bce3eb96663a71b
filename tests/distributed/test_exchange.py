import pytest
import torch
from torch import nn

from dome.compression import PowerSGD, RandomK, TopK
from dome.distributed.messages import Exchange
from dome.parameters import Layout


class Damaging:
    """Three workers in one process; a bit flips in what rank 1 sends, sums overflow."""

    rank, size = 2, 3

    def __init__(self, place):
        self._place = place

    def table(self, row):
        return [list(row)] * self.size

    def gather(self, tensor, kind):
        everyone = tensor.repeat(self.size)
        everyone[len(tensor) + self._place // 8] ^= 1 << self._place % 8
        return everyone

    def add_up_(self, tensor, kind):
        tensor.mul_(torch.inf)


@pytest.fixture
def layout():
    return Layout(nn.Linear(9, 11, bias=False))


def test_a_flipped_bit_is_an_error_that_names_who_sent_it_and_who_read_it(layout, rng):
    g = torch.randn(99, generator=rng)
    num_bits = TopK(4.0).num_bits(99)
    for place in torch.randperm(num_bits, generator=rng)[:50].tolist():
        exchange = Exchange(TopK(4.0), Damaging(place), layout)
        with pytest.raises(
            ValueError, match=r"^the message of rank 1 cannot be read by rank 2: .*dama"
        ):
            exchange(g)


@pytest.mark.parametrize("make", [lambda: RandomK(4.0), lambda: PowerSGD([(9, 11)])])
def test_a_sum_that_overflowed_is_an_error_that_names_all_ranks(make, layout, rng):
    g = torch.randn(99, generator=rng)
    exchange = Exchange(make(), Damaging(0), layout)
    with pytest.raises(
        ValueError,
        match=r"^the sum of the messages of all ranks cannot be read by rank",
    ):
        exchange(g)
