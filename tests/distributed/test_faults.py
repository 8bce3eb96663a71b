"""Workers that die inside a step, or are not alike: real processes, over loopback."""

import re

import pytest
from launch import run_workers

pytestmark = pytest.mark.slow
SIZE = 3


DYING = [("killed", 2), ("killed", 0), ("raises", 1), ("hangs", 1)]
BARRIER = [("killed, barrier", 2), ("hangs, barrier", 1)]
OPTIONS = ("options", 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{way and who: what each of three workers wrote down, and their exit codes}."""
    ways = [*DYING, *BARRIER, OPTIONS]
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
def test_a_worker_that_dies_inside_a_step_is_an_error_on_every_survivor(
    way, who, ended
):
    said, codes = ended[way, who]
    if way != "hangs":  # one that hangs finds the others gone when it wakes up
        assert said[who] == ""
    for rank in set(range(SIZE)) - {who}:
        assert codes[rank] == 1
        expected = rf"rank {rank} of 3 gave up at the gathered gradient \(3 steps begun"
        assert re.search(expected + ".*monitored_barrier", said[rank]), said


@pytest.mark.parametrize(("way", "who"), BARRIER)
def test_torch_names_the_missing_worker_in_the_barrier_that_the_error_points_to(
    way, who, ended
):
    said, _ = ended[way, who]
    assert re.search(f"Ranks? {who} failed to pass monitoredB", said[0]), said


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
