import pytest
import torch
from reference import gauss_newton, gradient_covariance, hessian
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from dome.curvature import Covariance, GaussNewton, Hessian
from dome.curvature.matrix import differentiable_attention

MATRICES = {
    "hessian": (Hessian, hessian),
    "gauss_newton": (GaussNewton, gauss_newton),
    "covariance": (Covariance, gradient_covariance),
}


class Skip(nn.Module):
    """Convolution, group norm, a shared layer, a bare and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.GroupNorm(2, 2)
        self.shared = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(8, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.conv(x.view(-1, 1, 2, 4)))).mean(1).flatten(1)
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return self.head(self.scale * x)


def dense():
    return nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 3))


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double()


def samples(rng, loss_fn, num=7):
    x = torch.randn(num, 8, generator=rng, dtype=torch.float64)
    if loss_fn is mse_loss:
        return x, torch.randn(num, 3, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=rng)


def directions(dim):
    # Random: a matrix that is wrong anywhere is wrong on them.
    random = torch.Generator().manual_seed(7)
    return torch.randn(dim, 2, generator=random, dtype=torch.float64)


def products(matrix):
    return torch.stack([matrix @ v for v in directions(matrix.dim).T], dim=1)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("loss_fn", [cross_entropy, mse_loss])
@pytest.mark.parametrize("make", [dense, Skip])
def test_products_are_those_of_the_explicit_matrix(rng, make, loss_fn, name):
    kind, twin = MATRICES[name]
    model, (x, y) = made(make), samples(rng, loss_fn)
    # Batches of 3, 3 and 1: means over batches of unequal size.
    matrix = kind(model, loss_fn, (x, y), batch_size=3)
    expected = twin(model, loss_fn, x, y) @ directions(matrix.dim)
    torch.testing.assert_close(products(matrix), expected)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_kept_graphs_give_the_same_products(rng, kind):
    model, data = made(Skip), samples(rng, cross_entropy)
    kept = kind(model, cross_entropy, data, batch_size=3, keep_graphs=True)
    expected = products(kind(model, cross_entropy, data, batch_size=3))
    for _ in range(2):
        torch.testing.assert_close(products(kept), expected)


def test_weights_are_read_anew_unless_graphs_are_kept(rng):
    model, data = made(dense), samples(rng, cross_entropy)
    fresh = Hessian(model, cross_entropy, data)
    kept = Hessian(model, cross_entropy, data, keep_graphs=True)
    v = torch.randn(fresh.dim, generator=rng, dtype=torch.float64)
    before = kept @ v
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(kept @ v, before)
    expected = hessian(model, cross_entropy, *data) @ v
    torch.testing.assert_close(fresh @ v, expected)
    assert not torch.allclose(expected, before)


@pytest.mark.parametrize("name", MATRICES)
def test_batches_of_a_loader_are_the_same_as_one_pair(rng, name):
    kind, _ = MATRICES[name]
    model, (x, y) = made(dense), samples(rng, cross_entropy)
    v = torch.randn(51, generator=rng, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=2
    )
    expected = kind(model, cross_entropy, (x, y)) @ v
    torch.testing.assert_close(kind(model, cross_entropy, loader) @ v, expected)
    parts = list(zip(x.split(2), y.split(2), strict=True))
    torch.testing.assert_close(kind(model, cross_entropy, parts) @ v, expected)


def test_attention_has_a_hessian(rng):
    layer = made(lambda: nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True))
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3))
    model, (x, y) = model.double(), samples(rng, cross_entropy, num=3)
    matrix = Hessian(model, cross_entropy, (x, y))
    v = torch.randn(matrix.dim, generator=rng, dtype=torch.float64)
    with differentiable_attention():
        expected = hessian(model, cross_entropy, x, y) @ v
    torch.testing.assert_close(matrix @ v, expected)


def test_nothing_is_left_on_the_model(rng):
    model, data = made(dense), samples(rng, cross_entropy)
    weights = [p.detach().clone() for p in model.parameters()]
    Hessian(model, cross_entropy, data) @ torch.ones(51)
    assert all(p.grad is None for p in model.parameters())
    for p, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, before)


def test_data_that_can_be_walked_over_once_is_refused(rng):
    x, y = samples(rng, cross_entropy)
    with pytest.raises(ValueError, match="generator, which can be read only"):
        Hessian(made(dense), cross_entropy, ((x, y) for _ in range(2)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no samples"),
        ((torch.ones(3, 8), torch.ones(2)), "3 inputs and 2 targets"),
        ([torch.ones(3, 8)], "inputs and targets .*got Tensor"),
    ],
)
def test_data_of_another_shape_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        Hessian(made(dense), cross_entropy, data)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.5)])
def test_layers_that_change_from_product_to_product_are_refused(rng, layer):
    model = nn.Sequential(layer, dense()).double()
    with pytest.raises(ValueError, match=f"0 is a {type(layer).__name__} in training"):
        Hessian(model, cross_entropy, samples(rng, cross_entropy))
    data = samples(rng, cross_entropy)
    matrix = Hessian(model.eval(), cross_entropy, data)
    v = torch.randn(matrix.dim, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(matrix @ v, hessian(model, cross_entropy, *data) @ v)


def test_wrong_vectors_losses_and_outputs_are_refused(rng):
    model, (x, y) = made(dense), samples(rng, cross_entropy)
    with pytest.raises(ValueError, match=r"shape \(51,\).*got \(3,\)"):
        Hessian(model, cross_entropy, (x, y)) @ torch.ones(3)
    apart = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(ValueError, match="mean over the batch"):
        Hessian(model, apart, (x, y)) @ torch.ones(51)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x), x

    with pytest.raises(ValueError, match="returns tuple"):
        GaussNewton(Two(), cross_entropy, (x, y)) @ torch.ones(51)
