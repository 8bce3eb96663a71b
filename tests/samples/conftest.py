import pytest
import torch
from torch import nn

from dome.parameters import Layout
from dome.samples import PerSample


@pytest.fixture
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.fixture
def source(model):
    source = PerSample(model, Layout(model))
    yield source
    source.detach()
