import pytest
import torch

from dome_lab.paper.models import resnet18


def test_has_the_usual_number_of_parameters():
    num_parameters = sum(p.numel() for p in resnet18().parameters())
    assert num_parameters == 11_271_432
    assert num_parameters == pytest.approx(1.13e7, rel=0.01)


def test_takes_small_images():
    model = resnet18(num_classes=7)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_treats_samples_independently():
    model = resnet18().double()
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 16, 16, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))
