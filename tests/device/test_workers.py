import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    paths = filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(worker), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for worker in range(2)
    ]
    try:
        told = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(told)
    return [json.loads((folder / f"{w}.json").read_text()) for w in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_on_a_device_train_as_two_on_the_cpu(way, apart):
    # Messages of the compressed way carry float32.
    limit = 1e-5 if way == "compressed" else 1e-12
    assert all(worker[way] < limit for worker in apart)


def test_every_way_is_named_here(apart):
    assert set(apart[0]) == set(WAYS)
