import gc
import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import calls_in_a_step

    gc.collect()
    gc.disable()  # what other tests left behind would be let go of in our step
    yield calls_in_a_step
    gc.enable()
    sys.modules.pop("calls_in_a_step")


# As they are: lower them when the way gets shorter.
@pytest.mark.parametrize(
    ("name", "options", "calls", "files", "changes"),
    [
        ("mlp", {}, 351, 34, 210),
        ("mlp", {"direction_rank": 2}, 445, 35, 263),
        ("conv", {}, 529, 36, 321),
    ],
)
def test_the_way_of_a_gradient_gets_no_longer(
    benchmark, name, options, calls, files, changes
):
    found = benchmark.profiled(benchmark.filtered_step(name, **options))
    where = [file for file, _ in found]
    assert 0 < len(found) <= calls
    assert len(set(where)) <= files
    assert sum(a != b for a, b in pairwise(where)) <= changes


def test_an_update_of_a_tracker_gets_no_longer(benchmark):
    found = benchmark.profiled(benchmark.one_update())
    assert 0 < len(found) <= 72
    assert len({file for file, _ in found}) <= 6
