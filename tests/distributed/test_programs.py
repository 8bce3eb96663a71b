import json
from pathlib import Path

import pytest
from launch import HERE, torchrun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_example_prints_what_each_way_sends(tmp_path):
    done = torchrun(
        ROOT / "examples/distributed.py",
        *("--epochs", "1", "--ways", "DDP", "worker", "sketch"),
        workers=2,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    title, heads, *lines = done.stdout.splitlines()
    assert title.startswith("2 workers")
    assert heads.split()[:3] == ["way", "bytes", "a"]
    shares = {line.split()[0]: float(line.split()[2]) for line in lines}
    assert shares["DDP"] == 1
    assert 1 < shares["worker"] < 1.02
    assert 0 < shares["sketch"] < 0.002


def test_the_example_of_fully_shard_goes_on_with_fewer_workers(tmp_path):
    said = ""
    for workers in (2, 1):
        done = torchrun(
            HERE / "few_digits.py",
            ROOT / "examples/fully_shard.py",
            *("--epochs", "1", "--folder", tmp_path / "saved"),
            workers=workers,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout
    first, second = said.splitlines()
    assert first.startswith("2 workers, step 4: accuracy 0.")
    assert 1 < float(first.split()[-3]) < 1.01  # of FSDP2's bytes
    assert second.startswith("1 workers, step 8: accuracy 0.")


def test_the_experiment_stores_its_rows_and_prints_a_table(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--scale", "smoke", "--seeds", "1", "--ways", "hadamard own"]
    script = ROOT / "benchmarks/workers_mnist.py"
    done = torchrun(script, *options, "--out", out, workers=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ways = [row.get("way") for row in rows]
    assert ways == [None, None, "hadamard own"]
    assert rows[2]["num_steps"] == 3
    assert rows[2]["total_bytes_sent"] < 0.002 * rows[2]["total_ddp_bytes"]
    assert "hadamard own     accuracy" in done.stdout
