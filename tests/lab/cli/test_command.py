import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dome_lab.cli import app

QUICK = ["demo", "--quick"]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_answers_at_once_without_torch():
    code = (
        "import sys; from dome_lab.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    # A quarter of it on an idle machine. Time of the processor: others may be at work.
    assert after.ru_utime - before.ru_utime < 1


def test_version_is_printed():
    assert run("--version").output.startswith("dome 0.")


@pytest.mark.parametrize(
    "wrong", [("--seeds", 1), ("--epochs", -2), ("--rank", 0), ("--rank", "many")]
)
def test_numbers_out_of_range_are_refused(tmp_path, wrong):
    result = run(*QUICK, "--out", tmp_path / "new", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
    assert result.output.count("\n") == 1
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
    code = "import sys; sys.modules['typer'] = None; import dome_lab.cli"
    done = python(code)
    assert done.returncode == 1
    assert "pip install 'dome-torch[lab]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dmo"], "'demo'"),
        (["demo", "--sees", 3], "--seeds"),
        (["train", "--lr"], "--lr"),
    ],
)
def test_a_typing_error_is_answered_in_one_line_with_the_nearest(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("dome: ")
    assert words in result.output
    assert result.output.count("\n") == 1


def test_nothing_typed_shows_the_help():
    result = run()
    assert "reproduce" in result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("words", "completed"),
    [("dome re", {"reproduce", "report"}), ("dome train --ra", {"--rank", "--rate"})],
)
def test_the_shell_completes_commands_and_options(monkeypatch, words, completed):
    monkeypatch.setenv("_DOME_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    done = python("from dome_lab.cli import main; main()")
    assert set(done.stdout.split()) == completed, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "no.such:model"],
        ["train", "--task", "no-such-task"],
        ["reproduce", "fig99"],
        ["report", "no-such-rows.jsonl"],
    ],
)
def test_a_mistake_is_one_line_and_debug_shows_where(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("dome: ")
    assert result.output.count("\n") == 1
    shown = run("--debug", *arguments)
    assert shown.exit_code == 2
    assert "Traceback" in shown.output
    assert shown.output.endswith(result.output)
