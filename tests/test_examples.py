import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WITH_WORKERS = ("distributed.py", "fully_shard.py")  # see tests/distributed
ALONE = [path for path in EXAMPLES if path.name not in WITH_WORKERS]


@pytest.mark.slow
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_every_example_runs_and_says_something(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_quickstart_stays_under_25_lines():
    (path,) = (path for path in EXAMPLES if path.name == "quickstart.py")
    assert len(path.read_text().splitlines()) < 25
