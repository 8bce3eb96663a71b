import pytest
from torch import nn

import dome
from dome.planning.units import size


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (3.5e3, "3.5 kB"),
        (2e6, "2 MB"),
        (2**30, "1.07 GB"),
        (1e13, "10 TB"),
    ],
)
def test_sizes_are_told_in_units_that_fit(num_bytes, told):
    assert size(num_bytes) == told


def test_one_process_and_workers_are_planned_in_the_same_units():
    here = str(dome.plan(nn.Linear(30, 20), rank=3, batch_size=4, memory=5 * 10**9))
    there = str(dome.plan_workers(10**9, rank=3, batch_size=4, num_workers=8))
    assert "5 GB available" in here
    assert "GB" in there
    assert "iB" not in here + there
