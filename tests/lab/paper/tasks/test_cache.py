from pathlib import Path

import numpy as np
import pytest

from dome_lab.paper.tasks.hub import cache_folder, cached

ARRAYS = {
    "x": np.arange(4000, dtype=np.uint8).reshape(2, 2, 1000),
    "y": np.array([3, -1]),
}


class Maker:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return ARRAYS


@pytest.fixture
def make():
    return Maker()


def is_right(arrays):
    return arrays.keys() == ARRAYS.keys() and all(
        np.array_equal(arrays[k], v) and arrays[k].dtype == v.dtype
        for k, v in ARRAYS.items()
    )


def test_arrays_are_made_once(make):
    assert is_right(cached("k", make))
    assert is_right(cached("k", make))
    assert make.calls == 1


def test_another_key_is_made_anew(make):
    cached("one", make)
    cached("other", make)
    assert make.calls == 2


def truncate(content):
    return content[: len(content) // 2]


def flip_a_pixel(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_a_pixel, lambda _: b""])
def test_a_damaged_file_is_made_anew(make, damage):
    cached("k", make)
    path = cache_folder() / "k.npz"
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert is_right(cached("k", make))
    assert make.calls == 2
    assert is_right(cached("k", make))
    assert make.calls == 2


def test_two_that_write_at_once_leave_one_whole_file(make):
    assert is_right(cached("k", lambda: cached("k", make)))
    assert [path.name for path in cache_folder().iterdir()] == ["k.npz"]
    assert is_right(cached("k", make))
    assert make.calls == 1


def test_what_cannot_be_made_leaves_nothing():
    with pytest.raises(ZeroDivisionError):
        cached("k", lambda: 1 / 0)
    assert not cache_folder().exists() or not list(cache_folder().iterdir())


def test_a_folder_that_takes_no_files_is_named(make, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DOME_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"file/cache.*set DOME_CACHE"):
        cached("k", make)


def test_without_a_variable_the_folder_is_the_users(monkeypatch):
    monkeypatch.delenv("DOME_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "dome"
