import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from dome_lab.cli import app

DOME = [sys.executable, "-m", "dome_lab"]
QUICK = ["demo", "--quick"]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def started(*arguments):
    return subprocess.Popen(
        [*DOME, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, to send Ctrl-C to
    )


def stored(folder):
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return sorted(
        ({k: v for k, v in row.items() if "seconds" not in k} for row in rows),
        key=lambda row: (row["arm"], str(row["rate"]), row["seed"], row["epoch"]),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, only_forked_workers):
    folder = tmp_path_factory.mktemp("demo")
    return folder, run(*QUICK, "--out", folder)


@pytest.mark.slow
def test_demo_writes_rows_and_picture(finished):
    folder, result = finished
    assert result.exit_code == 0, result.output
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["demo.png", "report.html", "rows.jsonl", "rows.meta.json"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    arms = {(row["arm"], row["rate"], row["seed"]) for row in stored(folder)}
    assert len(arms) == 2 * 3 * 3


@pytest.mark.slow
def test_demo_ends_with_table_and_sentence(finished):
    _, result = finished
    assert "Student t interval" in result.output
    assert "The filter took" in " ".join(result.output.split())


@pytest.mark.slow
def test_demo_goes_on_where_it_stopped_with_the_same_rows(finished):
    folder, _ = finished
    before = stored(folder)
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]) + lines[-2][:40])
    result = run(*QUICK, "--out", folder)
    assert "Going on: 15 of 18 runs are there" in result.output
    assert stored(folder) == before


@pytest.mark.slow
def test_demo_that_is_finished_says_so_and_draws_again(finished):
    folder, _ = finished
    (folder / "demo.png").unlink(missing_ok=True)
    result = run(*QUICK, "--out", folder)
    assert "Every run is there already" in result.output
    assert (folder / "demo.png").exists()


@pytest.mark.slow
def test_demo_with_other_settings_computes_them_and_keeps_the_rows(finished):
    folder, _ = finished
    before = stored(folder)
    result = run(*QUICK, "--out", folder, "--seeds", 4)
    assert "Going on: 18 of 24 runs are there" in result.output
    assert len(stored(folder)) == 24
    assert [row for row in stored(folder) if row["seed"] < 3] == before


@pytest.mark.slow
def test_two_demos_in_one_folder_write_no_row_twice(finished, tmp_path):
    lines = (finished[0] / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:17]))  # one run is to do
    first = started(*QUICK, "--out", tmp_path)
    wait_until((tmp_path / ".demo.lock").exists)
    second = run(*QUICK, "--out", tmp_path)
    assert second.exit_code == 1
    assert f"in use by process {first.pid} on " in " ".join(second.output.split())
    assert first.wait(timeout=200) == 0, first.communicate()[1]
    assert len(stored(tmp_path)) == 2 * 3 * 3
    first.communicate()


@pytest.mark.slow
def test_demo_is_stopped_by_ctrl_c(tmp_path):
    process = started(*QUICK, "--out", tmp_path, "--epochs", 500)
    wait_until((tmp_path / "rows.meta.json").exists)
    time.sleep(1)  # into the start of the processes
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 130
    assert f"stopped; rows so far in {tmp_path / 'rows.jsonl'}" in complaint
    assert "Traceback" not in complaint
    wait_until(lambda: not alive_in_group(process.pid))


def alive_in_group(group):
    listing = subprocess.check_output(["ps", "-A", "-o", "pgid=,stat="], text=True)
    states = [line.split() for line in listing.splitlines()]
    return [s for pgid, s in states if int(pgid) == group and not s.startswith("Z")]


def wait_until(condition, seconds=600):  # on a busy machine too
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
