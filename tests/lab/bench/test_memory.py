import os
from pathlib import Path

import pytest

from dome_lab.bench import memory

MIB = 2**20


def resident():
    return memory._status("VmRSS")


def grow_and_shrink(num_bytes):
    before = resident()
    is_reset = memory.reset_peak()
    block = bytearray(b"x") * num_bytes
    del block
    return {
        "reset": is_reset,
        "grown": memory.peak_memory() - before,
        "left": resident() - before,
    }


def alone(name, **arguments):
    """As the bench does it, in a new process: this one's heap has a past."""
    found = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(found)}
    return memory.in_fresh_process("test_memory", name, path, **arguments)


def grow_and_start_again(num_bytes):
    seen = grow_and_shrink(num_bytes)
    memory.reset_peak()
    return seen | {"above": memory.peak_memory() - resident()}


@pytest.fixture(scope="module")
def seen():
    found = alone("grow_and_start_again", num_bytes=64 * MIB)
    if not found["reset"]:
        pytest.skip("the peak cannot be reset here")
    return found


def test_the_peak_shows_memory_that_was_given_back(seen):
    assert 63 * MIB < seen["grown"] < 72 * MIB
    assert seen["left"] < 8 * MIB


def test_the_peak_can_start_again(seen):
    assert seen["above"] < 8 * MIB


def test_without_a_status_file_the_system_is_asked(monkeypatch, tmp_path):
    known = memory.peak_memory()
    monkeypatch.setattr(memory, "STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no" / "folder")
    assert not memory.reset_peak()
    assert memory.peak_memory() == pytest.approx(known, rel=0.5)


def test_a_function_answers_from_a_process_of_its_own():
    home, variables = "os", {"DOME_TEST": "seen"}
    answer = memory.in_fresh_process(home, "getenv", variables, key="DOME_TEST")
    assert answer == "seen"


def test_a_failure_in_the_process_is_one_line():
    with pytest.raises(RuntimeError, match=r"fsum\(seq=1\) failed .* code 1: TypeErr"):
        memory.in_fresh_process("math", "fsum", {}, seq=1)
