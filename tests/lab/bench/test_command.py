import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dome_lab.bench.questions import question_names, step_cost
from dome_lab.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_help_names_every_question():
    output = run("--help").output
    assert all(name in output for name in question_names())


def test_an_unknown_question_is_refused_with_those_there_are(tmp_path):
    result = run("speed", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert result.output == (
        "dome: no question 'speed': choose from " + ", ".join(question_names()) + "\n"
    )
    assert not (tmp_path / "new").exists()


def test_quick_and_full_exclude_each_other(tmp_path):
    result = run("--quick", "--full", "--out", tmp_path)
    assert result.exit_code == 2
    assert "exclude each other" in result.output


def test_a_file_as_folder_is_refused(tmp_path):
    (tmp_path / "taken").touch()
    result = run("soak", "--out", tmp_path / "taken")
    assert result.exit_code == 2
    assert "is a file: give a folder" in result.output


@pytest.mark.slow
def test_an_answer_is_shown_and_written(tmp_path, monkeypatch):
    monkeypatch.setitem(step_cost.SCALES, "quick", step_cost.SCALES["smoke"])
    result = run("--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "update_every=10" in result.output
    assert {p.name for p in tmp_path.iterdir()} == {"step_cost.json", "step_cost.md"}


def wait_for_child(pid, word):
    """Until a process has a child with this word in its command."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        time.sleep(10)  # not Linux
        return
    for _ in range(600):
        for child in children.read_text().split():
            with suppress(FileNotFoundError):  # gone in the meantime
                if word in Path(f"/proc/{child}/cmdline").read_text():
                    return
        time.sleep(0.1)
    raise AssertionError(f"no child of {pid} with {word!r}")


def test_ctrl_c_stops_it_in_one_line(tmp_path):
    command = [sys.executable, "-m", "dome_lab", "bench", "alone", "--full"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_child(process.pid, "import answer")
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 130
    assert complaint == f"stopped; questions that were finished are in {tmp_path}\n"
