import pytest
import torch

torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(1234)
