import pytest

from dome.planning.training import update_flops
from dome_lab.bench import floor


class FakeClock:
    """Every look at it takes half a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.5
        return self.now


@pytest.mark.parametrize(("rank", "batch_size"), [(8, 3), (8, 12), (4, 40)])
def test_flops_are_those_that_plan_counts_without_the_projection(rank, batch_size):
    dim = 3000
    products = floor.update_products(dim, rank, batch_size)
    projection = 4 * dim * rank
    total = sum(p.flops for p in products)
    assert total == update_flops(dim, rank, batch_size) - projection
    assert all(p.seconds > 0 for p in products)


def test_rates_are_work_over_time():
    assert floor.copy_rate(num_numbers=1000, clock=FakeClock()) == 2 * 4 * 1000 / 0.5
    assert floor.square_rate(clock=FakeClock(), size=10) == 2 * 10**3 / 0.5


def test_bytes_of_an_update_and_of_samples():
    assert floor.update_bytes(10, 3, 2) == 4 * 10 * (3 * 3 + 2 * 2)
    assert floor.samples_bytes(10, 2) == 2 * 4 * 10 * 2
