"""Workers that die inside a step, or are not alike: real processes, over loopback."""

import os
import re
import subprocess
import sys

import pytest
from launch import run_workers

from dome.distributed.roll_call import is_gone, own_place

pytestmark = pytest.mark.slow
SIZE = 3


DYING = [("killed", 2), ("killed", 0), ("raises", 1), ("hangs", 1)]
OPTIONS = ("options", 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{way and who: what each of three workers wrote down, and their exit codes}."""
    ways = [*DYING, OPTIONS]
    folders = [tmp_path_factory.mktemp(way) for way, _ in ways]
    groups = [(SIZE, folder, *way) for folder, way in zip(folders, ways, strict=True)]
    found = {}
    for way, folder, (_, codes) in zip(
        ways, folders, run_workers("dying.py", *groups), strict=True
    ):
        files = [folder / f"said.{rank}" for rank in range(SIZE)]
        said = [path.read_text() if path.exists() else "" for path in files]
        found[way] = said, codes
    return found


@pytest.mark.parametrize(("way", "who"), DYING)
def test_a_worker_that_dies_inside_a_step_is_named_by_every_survivor(way, who, ended):
    said, codes = ended[way, who]
    if way != "hangs":  # one that hangs finds the others gone when it wakes up
        assert said[who] == ""
    for rank in set(range(SIZE)) - {who}:
        assert codes[rank] == 1
        expected = (
            rf"rank {rank} of 3 gave up at .*: all ranks came to step 3, and "
            rf"rank {who} broke off in it"
        )
        ended = "" if way == "hangs" else r" \(process \d+ on .* has ended\)\. torch"
        # The others are alive, or gave up as well: nobody else is blamed.
        assert re.search(expected + ended, said[rank]), said


def test_an_option_that_one_worker_has_alone_is_named_by_all(ended):
    said, codes = ended[OPTIONS]
    assert codes == [0] * SIZE
    assert said[0] == said[1] == said[2]
    names = [line.partition(":")[0] for line in said[0].splitlines()]
    words = "workers have different options, "
    assert names == [
        words + name
        for name in (
            *("rank", "tracker", "oversample", "warmup", "update_every", "forget"),
            *("layout", "after", "basis_dtype", "compressor"),
        )
    ]
    assert "rank 0 has 4, rank 1 has 5, rank 2 has 4" in said[0]


def test_a_process_is_gone_when_it_has_ended_and_before_it_is_buried():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place = own_place().replace(str(os.getpid()), str(child.pid), 1)
    assert not is_gone(place)
    assert not is_gone(own_place())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert is_gone(place)
    child.communicate()
    assert is_gone(place)
    assert not is_gone(place.replace(" on ", " on another "))  # nobody can tell
