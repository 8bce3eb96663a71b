import json
import subprocess
import sys

import killed_runs
import killed_writer
import pytest


def test_a_kill_at_any_moment_of_a_write_loses_nothing_that_was_stored(tmp_path):
    done = subprocess.run(
        [sys.executable, killed_writer.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["kills"] >= 60
    assert counted["with_rows"] >= 30


@pytest.mark.slow
def test_a_run_killed_ten_times_at_random_moments_has_the_rows_of_one_that_was_not(
    tmp_path,
):
    done = subprocess.run(
        [sys.executable, killed_runs.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["kills"] == killed_runs.NUM_KILLS
    assert counted["resumed"] >= 3
