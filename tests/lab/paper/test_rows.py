import json

import pytest

from dome_lab.paper.rows import (
    append_run,
    broken_notes,
    finished_runs,
    key_of,
    mend,
    meta_path,
    read_rows,
    read_runs,
    record_session,
)
from dome_lab.paper.run import Run


def a_run(seed):
    return Run(task="digits", model="resnet8", seed=seed, batch_size=8, epochs=2)


def rows_of(seed, length=2):
    columns = a_run(seed).columns()
    return [columns | {"epoch": e, "loss": 0.1 * e + seed} for e in range(length)]


def seeds(path):
    return [run.seed for _, run in finished_runs(read_rows(path))]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_run(path, rows_of(0))
    append_run(path, rows_of(1))
    return path


def test_rows_come_back_as_they_were(path):
    found = finished_runs(read_rows(path))
    for seed in (0, 1):
        about = {"made_by": "train", "of": 2}
        assert found["train", a_run(seed)] == [row | about for row in rows_of(seed)]


def test_stored_rows_are_returned_as_they_will_be_read(tmp_path):
    stored = append_run(tmp_path / "rows.jsonl", rows_of(3))
    assert stored == read_rows(tmp_path / "rows.jsonl")


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
    mend(tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_anywhere_keeps_its_whole_runs_and_takes_new_ones(path, monkeypatch):
    monkeypatch.setattr("dome.files.os.fsync", lambda handle: None)  # it would wait
    content = path.read_bytes()
    first = len(content) // 2  # both runs are equally long
    ends = {0, 1, first - 1, first, first + 1, len(content) - 1, len(content)}
    for cut in sorted(ends | set(range(0, len(content), 9))):
        path.write_bytes(content[:cut])
        whole = [0, 1][: cut // first]
        assert seeds(path) == whole
        mend(path)
        assert path.stat().st_size == first * len(whole)
        append_run(path, rows_of(4))
        assert seeds(path) == [*whole, 4]


def test_what_a_crashed_disk_leaves_at_the_end_is_cut_off(path):
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 100 + b"\n" + b'{"seed": ')
    mend(path)
    assert path.read_bytes() == content


def test_mending_a_whole_file_does_not_touch_it(path):
    before = path.stat().st_mtime_ns
    mend(path)
    assert path.stat().st_mtime_ns == before


def test_a_run_stored_twice_counts_once(path):
    append_run(path, [row | {"loss": 9.0} for row in rows_of(1)])
    mend(path)
    assert len(read_rows(path)) == 6
    assert finished_runs(read_rows(path))["train", a_run(1)][0]["loss"] == 1


def test_rows_of_others_are_passed_over_and_left_alone(path):
    with path.open("a") as file:
        file.write('{"seed": 7, "arm": "plain"}\n')
        file.write(json.dumps(a_run(8).columns() | {"rank": -1, "of": 1}) + "\n")
    append_run(path, rows_of(5))
    before = path.read_bytes()
    mend(path)
    assert seeds(path) == [0, 1, 5]
    assert path.read_bytes() == before


@pytest.mark.parametrize("broken", [b"[1]", b'{"seed": ', b"\xff\xfe", b"\0\0\0x"])
def test_a_broken_line_is_refused_by_its_number_and_the_file_not_touched(path, broken):
    whole = path.read_bytes()
    path.write_bytes(broken + b"\n" + whole + b"\n" + broken + b"\n")
    append_run(path, rows_of(5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"lines 1, 7 cannot be read: delete lines 1"):
        mend(path)  # the sixth is empty
    assert path.read_bytes() == before
    assert seeds(path) == [0, 1, 5]
    lines = before.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[1:6], *lines[7:]]))
    mend(path)
    assert seeds(path) == [0, 1, 5]


def test_the_other_rows_of_a_run_with_a_broken_one_are_to_go_with_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    for seed in (0, 1, 2):
        append_run(path, rows_of(seed, length=3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"x" + lines[4], *lines[5:]]))
    with pytest.raises(
        ValueError, match=r"line 5 cannot be read: delete lines 4, 5, 6"
    ):
        mend(path)
    path.write_bytes(b"".join([*lines[:3], *lines[6:]]))
    mend(path)
    append_run(path, rows_of(1, length=3))
    assert finished_runs(read_rows(path))["train", a_run(1)][1]["epoch"] == 1


@pytest.mark.parametrize("place", [3, 4, 5])
def test_rows_of_a_run_that_lacks_some_are_of_no_run(tmp_path, place):
    path = tmp_path / "rows.jsonl"
    for seed in (0, 1, 2):
        append_run(path, rows_of(seed, length=3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:place], *lines[place + 1 :]]))
    mend(path)
    append_run(path, rows_of(1, length=3))
    assert seeds(path) == [0, 2, 1]
    epochs = [r["epoch"] for r in finished_runs(read_rows(path))["train", a_run(1)]]
    assert epochs == [0, 1, 2]


def test_a_file_that_is_only_looked_at_is_left_as_it_is(path):
    with path.open("a") as file:
        file.write("broken\n")
    append_run(path, rows_of(5))
    before = path.read_bytes()
    assert broken_notes(path) == [
        "rows.jsonl, line 5 cannot be read; the rest is used."
    ]
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes\n", "a\nb", "[1]\n", "{}", "\xff"])
def test_a_file_that_has_no_rows_is_refused_and_not_touched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes\.txt has no rows in it"):
        mend(path)
    assert path.read_text() == content


def test_rows_of_other_kinds_are_other_rows(path):
    append_run(path, rows_of(0, length=5), made_by="spectrum")
    found = finished_runs(read_rows(path))
    assert len(found["train", a_run(0)]) == 2
    assert len(found["spectrum", a_run(0)]) == 5


def test_numbers_json_does_not_have_become_null(tmp_path):
    path = tmp_path / "rows.jsonl"
    lost = {"loss": float("nan"), "norm": float("inf")}
    append_run(path, [a_run(0).columns() | lost])
    (row,) = read_rows(path)
    assert row["loss"] is row["norm"] is None


def test_a_column_that_was_not_there_yet_has_its_default():
    row = a_run(0).columns()
    del row["oversample"]
    assert key_of(row) == ("train", a_run(0))


def test_runs_are_read_from_several_files_the_first_one_first(path, tmp_path):
    append_run(tmp_path / "other.jsonl", [r | {"loss": 9.0} for r in rows_of(1)])
    append_run(tmp_path / "other.jsonl", rows_of(2))
    found = read_runs([path, tmp_path / "other.jsonl"])
    assert sorted(run.seed for _, run in found) == [0, 1, 2]
    assert found["train", a_run(1)][0]["loss"] == 1


def test_meta_file_says_what_made_the_rows(path):
    record_session(path, {"rank": 3}, "cpu")
    noted = json.loads(meta_path(path).read_text())
    assert noted["rank"] == 3
    (session,) = noted["made_with"]
    assert {"dome", "commit", "torch", "python", "device"} <= session.keys()


def test_meta_file_remembers_every_machine_once(path):
    for device in ("cpu", "a GPU", "cpu"):
        record_session(path, {"rank": 3}, device)
    record_session(path, {"rank": 4})
    noted = json.loads(meta_path(path).read_text())
    assert noted["rank"] == 4
    assert [session["device"] for session in noted["made_with"]] == ["cpu", "a GPU"]


def test_a_damaged_meta_file_is_begun_again(path):
    meta_path(path).write_text("{")
    record_session(path, {"rank": 3}, "cpu")
    assert len(json.loads(meta_path(path).read_text())["made_with"]) == 1


def test_nothing_temporary_is_left(path):
    record_session(path, {}, "cpu")
    mend(path)
    names = sorted(p.name for p in path.parent.iterdir())
    assert names == ["rows.jsonl", "rows.meta.json"]
