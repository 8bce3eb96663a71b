import pytest
import torch
from samples.loop import per_sample_loop
from torch import nn
from torch.testing import assert_close

from dome.trackers.factors import Product, Vectors

pytestmark = pytest.mark.usefixtures("float64")


def test_factors_multiplied_out_are_the_rows_of_a_linear_layer():
    model, x = nn.Linear(4, 3, bias=False), torch.randn(5, 7, 4)
    out = model(x).detach().requires_grad_()
    out.tanh().square().sum().backward()
    factors = Product(Vectors(out.grad), Vectors(x))
    assert_close(factors.rows().flatten(1), per_sample_loop(model, [x]))
