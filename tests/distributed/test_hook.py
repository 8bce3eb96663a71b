import pytest
from hook_checks import CHECKS
from launch import assert_passed, run_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    return run_program((3, 2), tmp_path_factory.mktemp("hook"), "hook_checks")


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_the_hook(name, num_workers, workers):
    assert_passed(workers[num_workers], name, num_workers)
