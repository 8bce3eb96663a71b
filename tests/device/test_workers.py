import json
from pathlib import Path

import pytest
from distributed.launch import run_workers
from simulated_device import AVAILABLE

HERE = Path(__file__).parent
WAYS = ("per_sample", "layer-wise", "svd", "worker", "compressed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not AVAILABLE, reason="this torch cannot have a device written in Python"
    ),
]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """How far two workers on the device are from two on the CPU, by worker and way."""
    folder = tmp_path_factory.mktemp("workers")
    ((told, codes),) = run_workers(HERE / "worker.py", (2, folder))
    assert codes == [0, 0], "\n".join(told)
    return [json.loads((folder / f"{w}.json").read_text()) for w in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_on_a_device_train_as_two_on_the_cpu(way, apart):
    # Messages of the compressed way carry float32.
    limit = 1e-5 if way == "compressed" else 1e-12
    assert all(worker[way] < limit for worker in apart)


def test_every_way_is_named_here(apart):
    assert set(apart[0]) == set(WAYS)
