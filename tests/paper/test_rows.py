import json

import pytest

from dome.paper.rows import append_rows, meta_path, read_rows, resume_rows

SETTINGS = {"rank": 3, "rates": (None, 10.0)}
KEY = ("seed",)


def run(seed, length=2):
    return [{"seed": seed, "epoch": e, "loss": 0.1 * e + seed} for e in range(length)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert resume_rows(path, SETTINGS, KEY, 2) == []
    append_rows(path, run(0) + run(1))
    return path


def test_rows_come_back_as_they_were(path):
    assert read_rows(path) == run(0) + run(1)


def test_same_settings_keep_the_finished_runs(path):
    assert resume_rows(path, SETTINGS, KEY, 2) == run(0) + run(1)


def test_half_a_run_and_half_a_line_are_dropped(path):
    append_rows(path, run(2, length=1))
    with path.open("a") as file:
        file.write('{"seed": 3, "epo')
    assert resume_rows(path, SETTINGS, KEY, 2) == run(0) + run(1)
    append_rows(path, run(4))
    assert read_rows(path) == run(0) + run(1) + run(4)


def test_other_settings_start_afresh_and_say_so(path):
    assert resume_rows(path, SETTINGS | {"rank": 4}, KEY, 2) is None
    assert read_rows(path) == []
    assert json.loads(meta_path(path).read_text())["settings"]["rank"] == 4


def test_rows_without_a_readable_meta_file_are_not_trusted(path):
    meta_path(path).write_text("{")
    assert resume_rows(path, SETTINGS, KEY, 2) is None


def test_meta_file_says_what_made_the_rows(path):
    made_with = json.loads(meta_path(path).read_text())["made_with"]
    assert {"dome", "commit", "torch", "python", "device"} <= made_with.keys()


def test_nothing_temporary_is_left(path):
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "rows.jsonl",
        "rows.meta.json",
    ]
