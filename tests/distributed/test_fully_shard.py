import pytest
from fsdp_checks import CHECKS
from test_workers import assert_passed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_workers_of_fully_shard(name, num_workers, fsdp_workers):
    assert_passed(fsdp_workers[num_workers], name, num_workers)
