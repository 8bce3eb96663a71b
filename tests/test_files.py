import errno
import os
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import dome
from dome import files
from dome.diagnostics import FilterStats
from dome.files import DiskFullError, append_bytes, whole_file, write_bytes

KNOWN = FilterStats(**{field.name: 1 for field in fields(FilterStats)})
OLD, NEW = b"old\n", b"a new line that is rather long\n"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def small_disk(monkeypatch, room):
    """Writes end when so many bytes are there; the last one is short, as a disk's."""
    left = [room]
    really = os.write

    def write(handle, content):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        number = really(handle, bytes(content)[: left[0]])
        left[0] -= number
        return number

    monkeypatch.setattr(files.os, "write", write)


@pytest.mark.parametrize("write", [append_bytes, write_bytes])
@pytest.mark.parametrize("room", [0, 1, len(NEW) - 1])
def test_a_full_disk_is_named_and_the_file_is_as_before(
    tmp_path, monkeypatch, write, room
):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(OLD)
    small_disk(monkeypatch, room)
    with pytest.raises(DiskFullError, match=r"disk full .*rows\.jsonl is as it was"):
        write(path, NEW)
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize("step", [1, 7])
def test_short_writes_are_gone_on_with(tmp_path, monkeypatch, step):
    really = os.write
    monkeypatch.setattr(files.os, "write", lambda h, c: really(h, bytes(c)[:step]))
    append_bytes(tmp_path / "added", OLD)
    append_bytes(tmp_path / "added", NEW)
    write_bytes(tmp_path / "whole", NEW)
    assert (tmp_path / "added").read_bytes() == OLD + NEW
    assert (tmp_path / "whole").read_bytes() == NEW


@pytest.mark.parametrize("write", [append_bytes, write_bytes])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_the_disk_says_when_it_is_asked_to_keep_it_counts(
    tmp_path, monkeypatch, write, number
):
    def refuse(handle):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "rows.jsonl"
    path.write_bytes(OLD)
    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full" if number != errno.EIO else "error"):
        write(path, NEW)
    assert path.read_bytes() == OLD


@pytest.mark.parametrize("write", [append_bytes, write_bytes])
def test_a_press_of_ctrl_c_in_a_write_leaves_the_file_as_before(
    tmp_path, monkeypatch, write
):
    def interrupted(handle):
        raise KeyboardInterrupt

    path = tmp_path / "rows.jsonl"
    path.write_bytes(OLD)
    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path, NEW)
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["rows.jsonl"]


def test_a_recorder_on_a_full_disk_keeps_its_records_and_goes_on_later(
    tmp_path, monkeypatch
):
    fake = SimpleNamespace(stats=KNOWN)
    monkeypatch.setattr("dome.recording.time", SimpleNamespace(perf_counter=lambda: 0))
    for name in ("run.csv", "run.jsonl"):
        path = tmp_path / name
        with dome.Recorder(path) as recorder:
            for room in (0, 3):  # not even the header fits
                with monkeypatch.context() as patch:
                    small_disk(patch, room)
                    with pytest.raises(DiskFullError, match=f"disk full .*{name}"):
                        recorder.record(fake)
                assert path.read_bytes() == b""
            recorder.record(fake)
            before = path.read_bytes()
            with monkeypatch.context() as patch:
                small_disk(patch, 10)
                with pytest.raises(DiskFullError):
                    recorder.record(fake)
            assert path.read_bytes() == before
            recorder.record(fake)
        line = before.splitlines(keepends=True)[-1]
        assert path.read_bytes() == before + line
        with pytest.raises(ValueError, match="was closed: open it again"):
            recorder.record(fake)


def test_a_state_that_torch_writes_onto_a_full_disk_is_told_as_that(tiny_disk):
    path = tiny_disk / "run.state"
    with whole_file(path) as file:
        torch.save({"small": torch.arange(9)}, file)
    with pytest.raises(DiskFullError, match="disk full"), whole_file(path) as file:
        torch.save({"large": torch.zeros(100_000)}, file)
    assert torch.load(path)["small"].tolist() == list(range(9))
    assert names(tiny_disk) == ["run.state"]


def test_on_a_disk_that_is_really_full_nothing_is_lost(tiny_disk):
    path = tiny_disk / "rows.jsonl"
    line = b"x" * 9_999 + b"\n"
    for _ in range(6):
        append_bytes(path, line)
    with pytest.raises(DiskFullError, match="disk full"):
        append_bytes(path, line)
    stored = path.read_bytes()
    assert stored == 6 * line
    with pytest.raises(DiskFullError, match="disk full"):
        write_bytes(path, 20 * line)
    assert path.read_bytes() == stored
    assert names(tiny_disk) == ["rows.jsonl"]
