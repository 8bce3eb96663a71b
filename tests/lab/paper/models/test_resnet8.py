import pytest
import torch

from dome_lab.paper.models import resnet8


def test_has_the_papers_number_of_parameters():
    assert sum(p.numel() for p in resnet8().parameters()) == 78_042


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_takes_digits_mnist_and_cifar(shape):
    model = resnet8(in_channels=shape[0], num_classes=7)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_treats_samples_independently():
    model = resnet8(1).double()
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 8, 8, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))
