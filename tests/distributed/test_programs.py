import json
import re
from pathlib import Path

import pytest
from launch import run_as_torchrun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAYS = ("--ways", "DDP", "worker", "sketch")
SHARDED = ("examples/fully_shard.py", "--epochs", 1, "--folder", "../saved")
TABLE = ("--scale", "smoke", "--seeds", 1, "--ways", "hadamard own")
STARTS = {
    "example": (2, "examples/distributed.py", "--epochs", 3, *WAYS),
    "hook": (2, "examples/comm_hook.py"),
    "two": (2, *SHARDED),
    "one": (1, *SHARDED),
    "table": (2, "benchmarks/workers_mnist.py", *TABLE, "--out", "rows.jsonl"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the first worker of a start printed, and the folder it ran in."""
    above = tmp_path_factory.mktemp("programs")
    starts = []
    for name, (num_workers, program, *options) in STARTS.items():
        (above / name).mkdir()
        starts.append((num_workers, above / name, ROOT / program, *options))
    ended = dict(zip(STARTS, run_as_torchrun(*starts), strict=True))

    def of(name):
        outputs, codes = ended[name]
        assert codes == [0] * STARTS[name][0], outputs
        return (above / name / "said.0").read_text(), above / name

    return of


def test_the_example_prints_what_each_way_sends(said):
    title, heads, *lines = said("example")[0].splitlines()
    assert title.startswith("2 workers")
    assert heads.split()[:3] == ["way", "bytes", "a"]
    shares = {line.split()[0]: float(line.split()[2]) for line in lines}
    assert shares["DDP"] == 1
    assert 1 < shares["worker"] < 1.02
    assert 0 < shares["sketch"] < 0.002


def test_the_example_of_the_hook_trains(said):
    (line,) = said("hook")[0].splitlines()
    assert line.startswith("2 workers, step 60: kept 0.")
    filtered, plain = map(float, re.findall(r"(0\.\d+) with", line))
    assert filtered > 0.3  # a guess is 0.1
    assert plain > 0.1


def test_the_example_of_fully_shard_goes_on_with_fewer_workers(said):
    plain, first = said("two")[0].splitlines()
    assert plain.startswith("no filter, epoch 1: accuracy 0.")
    assert first.startswith("2 workers, step 4: accuracy 0.")
    assert 1 < float(first.split()[-3]) < 1.01  # of FSDP2's bytes
    (second,) = said("one")[0].splitlines()
    assert second.startswith("1 workers, step 8: accuracy 0.")


def test_the_experiment_stores_its_rows_and_prints_a_table(said):
    printed, folder = said("table")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    ways = [row.get("way") for row in rows]
    assert ways == [None, None, "hadamard own"]
    assert rows[2]["num_steps"] == 3
    assert rows[2]["total_bytes_sent"] < 0.002 * rows[2]["total_ddp_bytes"]
    assert "hadamard own     accuracy" in printed
