import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny_figure
from typer.testing import CliRunner

from dome_lab.cli import app, reproduce
from dome_lab.paper import figures
from dome_lab.paper import reproduce as engine
from dome_lab.paper.jobs import digest_of
from dome_lab.paper.lock import locked
from dome_lab.paper.rows import append_run, read_rows

NAME = tiny_figure.NAME


def run(*arguments, **options):
    words = ["reproduce", *map(str, arguments)]
    return CliRunner().invoke(app, words, **options)


@pytest.fixture
def tiny(monkeypatch, forked_workers):
    monkeypatch.setattr(figures, "figure_names", lambda: [NAME])
    monkeypatch.setattr(figures, "load_figure", lambda name: tiny_figure)
    caption = tiny_figure.__doc__.splitlines()[0]
    monkeypatch.setattr(figures, "caption", lambda name: caption)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_one_command_gives_rows_pictures_and_verdicts(tmp_path):
    result = run("fig90", "--scale", "smoke", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "smoke").iterdir()) == [
        "claims.json",
        f"{NAME}.jsonl",
        f"{NAME}.meta.json",
        f"{NAME}.pdf",
        f"{NAME}.png",
        "report.html",
    ]
    shown = " ".join(result.output.split())
    assert "fig90 has rows not evidence rows 8" in shown
    assert "1 claims: not evidence, the runs are too small." in shown
    assert str(tmp_path / "smoke" / f"{NAME}.png") in shown
    assert "of computing" in shown

    again = run("all", "--scale", "smoke", "--out", tmp_path)
    assert "fig90 has rows not evidence" in " ".join(again.output.split())
    assert len((tmp_path / "smoke" / f"{NAME}.jsonl").read_text().splitlines()) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_goes_on_where_it_stopped(tmp_path):
    run("fig90", "--scale", "cpu", "--out", tmp_path)
    path = tmp_path / "cpu" / f"{NAME}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]) + lines[6][:50])
    (tmp_path / "cpu" / f"{NAME}.png").unlink()
    drawn = run("fig90", "--scale", "cpu", "--out", tmp_path, "--draw-only")
    assert drawn.exit_code == 2
    assert "runs are missing, 1 of 4 for fig90" in drawn.output
    result = run("fig90", "--scale", "cpu", "--out", tmp_path, "--processes", 1)
    assert "Going on: 3 of 4 runs are there" in result.output
    assert sorted(map(without_seconds, path.read_text().splitlines())) == sorted(
        map(without_seconds, lines)
    )
    drawn = run("fig90", "--scale", "cpu", "--out", tmp_path, "--draw-only")
    assert drawn.exit_code == 0
    assert (tmp_path / "cpu" / f"{NAME}.png").exists()


def without_seconds(line):
    row = json.loads(line)
    return json.dumps({k: v for k, v in row.items() if "seconds" not in k})


@pytest.mark.usefixtures("tiny")
def test_the_papers_scale_without_a_gpu_asks_somebody(tmp_path):
    result = run("fig90", "--scale", "paper", "--out", tmp_path)
    assert result.exit_code == 2
    assert "add --yes" in result.output
    assert result.output.count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_papers_scale_shows_what_it_would_take(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "_has_terminal", lambda: True)
    monkeypatch.setattr(engine, "read_samples", lambda plan: ())
    refused = run("fig90", "--scale", "paper", "--out", tmp_path, input="n\n")
    assert refused.exit_code == 2
    assert "corrected as epochs end" in refused.output
    assert "not started" in refused.output
    assert not list((tmp_path / "paper").glob("*.jsonl"))
    accepted = run(
        "fig90", "--scale", "paper", "--out", tmp_path, "--yes", "--processes", 1
    )
    assert accepted.exit_code == 0
    assert "corrected as epochs end" in accepted.output
    assert list((tmp_path / "paper").glob("*.jsonl"))


@pytest.mark.usefixtures("tiny")
def test_list_shows_caption_and_number_of_runs():
    result = run("--list")
    shown = " ".join(result.output.split())
    assert "fig90 Two arms on a few digits. 4 4 - 2 1 s 1 s 1 s" in shown
    assert "hours of one core" in shown


def test_list_shows_every_figure_of_the_paper():
    result = run("--list")
    assert result.exit_code == 0, result.output
    for name in figures.figure_names():
        assert figures.short_name(name) in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fig3"], "did you mean 'fig03'"),
        (["fig03", "--scale", "cpus"], "no scale 'cpus', did you mean 'cpu'?"),
        ([], "which figure? Name some, or all"),
        (["fig03", "--processes", 0], "--processes"),
        (["fig04", "--scale", "full"], "fig04 has no scale 'full': choose from"),
    ],
)
def test_a_typing_error_is_answered_in_one_line(tmp_path, arguments, words):
    result = run(*arguments, "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_data_that_is_not_there_stops_it_before_anything_is_computed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DOME_DATA", "")  # put back after --data-dir has set it
    result = run("fig03", "--out", tmp_path, "--data-dir", tmp_path / "none")
    assert result.exit_code == 1
    assert result.output.startswith(f"dome: mnist: no folder {tmp_path / 'none'}")
    assert result.output.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_stops_it_in_one_line(tmp_path):
    words = ["reproduce", "fig03", "--scale", "smoke", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dome_lab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    meta = tmp_path / "smoke" / "fig03_mnist_compression.meta.json"
    end = time.monotonic() + 600  # on a busy machine too
    while not meta.exists():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 130
    assert complaint == (
        f"stopped; what is finished is in {tmp_path}; the same command goes on\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_run_of_another_command_is_waited_for_and_not_computed_again(tmp_path):
    folder = tmp_path / "smoke"
    folder.mkdir()
    first = tiny_figure.runs(tiny_figure.SCALES["smoke"])[0]
    rows = [first.columns() | {"epoch": e, "train_loss": 7.0} for e in (1, 2)]

    def other():
        with locked(folder, f".{digest_of(('train', first))}.lock"):
            is_held.set()
            is_last.wait(120)
            append_run(folder / f"{NAME}.jsonl", rows)

    is_held, is_last = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    is_held.wait(120)
    threading.Timer(3.0, is_last.set).start()
    result = run("fig90", "--scale", "smoke", "--out", tmp_path)
    thread.join()
    assert result.exit_code == 0, result.output
    stored = read_rows(folder / f"{NAME}.jsonl")
    assert len(stored) == 8
    assert [row["train_loss"] for row in stored].count(7.0) == 2


@pytest.mark.usefixtures("tiny")
def test_how_long_it_takes_is_told_before_the_first_epoch(tmp_path):
    result = run("fig90", "--scale", "smoke", "--out", tmp_path, "--processes", 2)
    told = " ".join(result.output.split())
    assert told.count(": stored; about") == 4  # no terminal, no bar
    assert "4 runs, 2 at a time: about 0 s, corrected as epochs end." in told


@pytest.mark.usefixtures("tiny")
def test_a_broken_line_is_refused_by_its_number(tmp_path):
    folder = tmp_path / "smoke"
    folder.mkdir()
    path = folder / f"{NAME}.jsonl"
    for each in tiny_figure.runs(tiny_figure.SCALES["smoke"]):
        columns = each.columns()
        rows = [columns | {"epoch": e, "train_loss": 1.0} for e in (1, 2)]
        append_run(path, rows)
    lines = path.read_text().splitlines(keepends=True)
    text = "".join([*lines[:4], "broken\n", *lines[4:]])
    path.write_text(text)
    arguments = ("fig90", "--scale", "smoke", "--out", tmp_path, "--draw-only")
    result = run(*arguments)
    assert result.exit_code == 1
    assert f"{NAME}.jsonl, line 5 cannot be read: delete line 5" in result.output
    assert path.read_text() == text
    path.write_text("".join(lines))
    assert run(*arguments).exit_code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_disk_that_fills_is_told_and_what_was_stored_is_whole(tiny_disk):
    (tiny_disk / "ballast").write_bytes(b"x" * 40_000)
    words = ("fig90", "--scale", "smoke", "--out", tiny_disk, "--processes", 1)
    result = run(*words)
    assert result.exit_code == 1, result.output
    assert "disk full (No space left" in result.output.splitlines()[-1]
    path = tiny_disk / "smoke" / f"{NAME}.jsonl"
    stored = path.read_text() if path.exists() else ""  # a state is larger
    assert all(json.loads(line) for line in stored.splitlines())
    assert [p.name for p in tiny_disk.rglob("*.tmp")] == []
    (tiny_disk / "ballast").unlink()
    again = run("fig90", "--scale", "smoke", "--out", tiny_disk, "--draw-only")
    assert (path.read_text() if path.exists() else "") == stored
    assert again.exit_code in (0, 1, 2)  # what is left of 64 kB may hold the picture
