import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from dome_lab.paper import lock
from dome_lab.paper.lock import LOCK_FILE, STALE, LockedError, locked

HOLD = (
    "import sys, pathlib; from dome_lab.paper.lock import locked\n"
    "with locked(pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_told_who_holds_the_folder(tmp_path, holder):
    who = f"process {holder.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(LockedError, match=f"in use by {who}"), locked(tmp_path):
        pass
    holder.communicate("")
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_does_not_count(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == holder.pid
    with locked(tmp_path):
        about = json.loads((tmp_path / LOCK_FILE).read_text())
        assert about["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0" * 50])
def test_a_lock_file_with_nobody_in_it_does_not_count(tmp_path, content):
    (tmp_path / LOCK_FILE).write_text(content)
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def foreign_lock(folder, age=0.0):
    about = {"pid": 17, "host": "elsewhere", "since": "2026-01-01 00:00:00"}
    path = folder / LOCK_FILE
    path.write_text(json.dumps(about))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return about


def test_the_lock_of_another_machine_is_believed_while_it_gives_signs_of_life(tmp_path):
    about = foreign_lock(tmp_path, age=STALE / 2)
    told = r"process 17 on elsewhere, .* is 90 s old, and at 180 s .* taken over"
    with pytest.raises(LockedError, match=told), locked(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == about


def test_the_lock_of_another_machine_without_a_sign_of_life_is_taken_over(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "SETTLE", 0.01)
    foreign_lock(tmp_path, age=STALE + 1)
    with locked(tmp_path):
        about = json.loads((tmp_path / LOCK_FILE).read_text())
        assert (about["pid"], about["host"]) == (os.getpid(), socket.gethostname())
    assert list(tmp_path.iterdir()) == []


def test_of_two_machines_that_take_a_lock_over_the_last_one_has_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "time", OtherMachine(tmp_path / LOCK_FILE))
    foreign_lock(tmp_path, age=STALE + 1)
    with pytest.raises(LockedError, match="process 18 on third"), locked(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "third"


class OtherMachine:
    """The clock of this machine; while it sleeps another one writes the lock file."""

    def __init__(self, path):
        self.path = path
        self.monotonic, self.strftime = time.monotonic, time.strftime

    def sleep(self, _):
        self.path.write_text(json.dumps({"pid": 18, "host": "third"}))


def test_a_lock_that_is_held_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    path = tmp_path / LOCK_FILE
    with locked(tmp_path):
        os.utime(path, (0, 0))
        end = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < end, "it gave none"
            time.sleep(0.01)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_lock_file_that_was_damaged_is_removed_with_the_lock(tmp_path, content):
    with locked(tmp_path):
        (tmp_path / LOCK_FILE).write_text(content)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_machine_took_over_is_left_to_it(tmp_path):
    with locked(tmp_path):
        about = foreign_lock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == about


def test_of_many_that_want_it_at_once_one_at_a_time_has_it(tmp_path):
    inside, most, refused = [], [], []

    def work():
        for _ in range(50):
            try:
                with locked(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except LockedError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) + len(refused) == 200


def test_who_waits_gets_it_when_it_is_free(tmp_path):
    order = []

    def wait():
        with locked(tmp_path, patience=60):
            order.append("waited")

    thread = threading.Thread(target=wait)
    with locked(tmp_path):
        thread.start()
        time.sleep(0.2)
        order.append("held")
    thread.join()
    assert order == ["held", "waited"]
    with locked(tmp_path), pytest.raises(LockedError), locked(tmp_path, patience=0.1):
        pass
