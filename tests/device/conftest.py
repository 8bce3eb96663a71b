import pytest
from simulated_device import AVAILABLE, simulated_device


@pytest.fixture
def device():
    if not AVAILABLE:
        pytest.skip("this torch cannot have a backend written in Python")
    with simulated_device() as device:
        yield device
