import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import run_program


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    """{P: results}, three first: two go on from what they saved; and where that is."""
    folder = tmp_path_factory.mktemp("workers")
    return run_program((3, 2), folder), folder / "shared"


@pytest.fixture(scope="session")
def fsdp_workers(tmp_path_factory):
    """{P: results}; three workers first: the others go on from what they saved."""
    return run_program((3, 2, 4), tmp_path_factory.mktemp("fsdp"), "fsdp_checks")
