import pytest
import torch
from simulated_device import AVAILABLE, register, simulated_device

# While tests are collected: once a backward pass has run it is too late.
if AVAILABLE:
    register()


class Cuda:
    """A real device under the same two names."""

    name = "cuda"

    def generator(self, seed):
        return torch.Generator(self.name).manual_seed(seed)


@pytest.fixture
def simulated():
    """The simulated device, which draws the CPU's numbers and lists its waits."""
    if not AVAILABLE:
        pytest.skip("this torch cannot have a device written in Python")
    with simulated_device() as device:
        yield device


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device that is not the CPU: the simulated one, and CUDA under ``-m gpu``."""
    if request.param == "simulated":
        return request.getfixturevalue("simulated")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Cuda()
