import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from dome.cli import app

DOME = [sys.executable, "-m", "dome.cli"]
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


def python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def stored(folder):
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return sorted(
        ({k: v for k, v in row.items() if k != "seconds"} for row in rows),
        key=lambda row: (row["arm"], str(row["rate"]), row["seed"], row["epoch"]),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, run(*QUICK, "--out", folder)


@pytest.mark.slow
def test_demo_writes_rows_and_picture(finished):
    folder, result = finished
    assert result.exit_code == 0, result.output
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["demo.png", "rows.jsonl", "rows.meta.json"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    arms = {(row["arm"], row["rate"], row["seed"]) for row in stored(folder)}
    assert len(arms) == 2 * 3 * 2


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
    assert "Going on: 9 of 12 runs are there" in result.output
    assert stored(folder) == before


@pytest.mark.slow
def test_demo_that_is_finished_says_so_and_draws_again(finished):
    folder, _ = finished
    (folder / "demo.png").unlink(missing_ok=True)
    result = run(*QUICK, "--out", folder)
    assert "Every run is there already" in result.output
    assert (folder / "demo.png").exists()


@pytest.mark.slow
def test_demo_with_other_settings_starts_afresh_and_is_stopped_by_ctrl_c(finished):
    folder, _ = finished
    process = started(*QUICK, "--out", folder, "--epochs", 500)
    meta = folder / "rows.meta.json"
    wait_until(lambda: json.loads(meta.read_text())["settings"]["epochs"] == 500)
    time.sleep(1)  # into the start of the processes
    os.killpg(process.pid, signal.SIGINT)
    output, complaint = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "The settings changed: starting afresh" in output
    assert f"stopped; rows so far in {folder / 'rows.jsonl'}" in complaint
    assert "Traceback" not in complaint
    wait_until(lambda: not alive_in_group(process.pid))


def alive_in_group(group):
    listing = subprocess.check_output(["ps", "-A", "-o", "pgid=,stat="], text=True)
    states = [line.split() for line in listing.splitlines()]
    return [s for pgid, s in states if int(pgid) == group and not s.startswith("Z")]


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_help_answers_at_once_without_torch():
    code = (
        "import sys; from dome.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    started_at = time.perf_counter()
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    # Half a second on an idle machine; the tests may run beside other work.
    assert time.perf_counter() - started_at < 2


def test_version_is_printed():
    assert run("--version").output.startswith("dome 0.")


@pytest.mark.parametrize(
    "wrong", [("--seeds", 1), ("--epochs", -2), ("--rank", 0), ("--rank", "many")]
)
def test_numbers_out_of_range_are_refused(tmp_path, wrong):
    result = run(*QUICK, "--out", tmp_path / "new", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
    assert not (tmp_path / "new").exists()


def test_a_file_as_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "taken").touch()
    result = run(*QUICK, "--out", tmp_path / "taken")
    assert result.exit_code == 2
    assert (
        result.output == f"dome: --out {tmp_path / 'taken'} is a file: give a folder\n"
    )


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "taken").touch()
    result = run(*QUICK, "--out", tmp_path / "taken" / "below")
    assert result.exit_code == 2
    assert "cannot be written to: " in result.output
    assert result.output.count("\n") == 1


def test_debug_shows_where_an_error_came_from(tmp_path):
    (tmp_path / "taken").touch()
    result = run("--debug", *QUICK, "--out", tmp_path / "taken" / "below")
    assert result.exit_code == 2
    assert "Traceback" in result.output


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import dome.cli"
    done = python(code)
    assert done.returncode == 1
    assert "pip install 'dome-torch[paper]'" in done.stderr
    assert "Traceback" not in done.stderr
