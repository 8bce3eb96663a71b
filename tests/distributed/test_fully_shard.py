import re

import pytest
from fsdp_checks import CHECKS
from launch import assert_passed, run_workers
from torch.distributed.fsdp import FSDPModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs torch 2.9"
    ),
]


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_workers_of_fully_shard(name, num_workers, fsdp_workers):
    assert_passed(fsdp_workers[num_workers], name, num_workers)


KILLED = {
    "forward": "the gathered parameters",
    "forward, one group": "the gathered parameters",
    "backward": "the (gathered parameters|exchange of samples)",  # by who is faster
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """{where: the folder in which survivors wrote, and what all printed}."""
    folders = {where: tmp_path_factory.mktemp("killed") for where in KILLED}
    groups = [(3, folder, where) for where, folder in folders.items()]
    ended = run_workers("fsdp_killed.py", *groups)
    return {
        where: (folder, outputs)
        for (where, folder), (outputs, _) in zip(folders.items(), ended, strict=True)
    }


@pytest.mark.parametrize(("where", "told"), KILLED.items())
def test_a_killed_worker_is_an_error_on_every_survivor(where, told, killed):
    folder, outputs = killed[where]
    for rank in (0, 2):
        path = folder / f"said.{rank}"
        assert path.exists(), outputs
        said = path.read_text()
        assert re.match(
            rf"rank {rank} of 3 gave up at {told} \(2 steps begun\): another", said
        ), said
