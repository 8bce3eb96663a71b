import json
import subprocess
import sys

import killed_writer


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
