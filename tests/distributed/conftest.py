import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import run_program


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def three_workers(tmp_path_factory, shared):
    return run_program(3, tmp_path_factory.mktemp("three"), shared)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory, shared, three_workers):
    # After three: it goes on from what they saved.
    return run_program(2, tmp_path_factory.mktemp("two"), shared)


@pytest.fixture(scope="session")
def fsdp_workers(tmp_path_factory):
    """{P: results}; three workers first: the others go on from what they saved."""
    shared = tmp_path_factory.mktemp("shared_fsdp")
    return {
        num: run_program(
            num, tmp_path_factory.mktemp(f"fsdp{num}"), shared, "fsdp_checks"
        )
        for num in (3, 2, 4)
    }
