import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
import dome.privacy
from dome.reference import per_sample_loop

WAYS = {
    "one basis": {},
    "svd": {"tracker": "svd"},
    "layer-wise": {"layout": "layerwise"},
    "stream": {"layout": "layerwise", "stream": True},
    "low rank": {"direction_rank": 2},
    "micro-batches": {"samples": "microbatch"},
}
# torch says that there is nothing to initialise
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element")


class Net(nn.Module):
    def __init__(self, width=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 6)
        self.last = nn.Linear(6, 3)
        if width is not None:
            self.empty = nn.Linear(6, width)
            self.nothing = nn.Parameter(torch.zeros(width))
        self.double()

    def forward(self, x):
        hidden = self.first(x).relu()
        out = self.last(hidden)
        if hasattr(self, "empty"):
            out = out + self.empty(hidden).sum(-1, keepdim=True) + self.nothing.sum()
        return out


def trained(model, options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=2, **options)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(3):
            x = torch.randn(6, 8, generator=random, dtype=torch.float64)
            y = torch.randint(3, (6,), generator=random)
            cross_entropy(model(x), y).backward()
            if options.get("samples") != "microbatch":
                break
        optimizer.step()
    return [p.detach() for p in model.parameters() if p.numel()]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_a_layer_without_outputs_changes_nothing(options):
    torch.testing.assert_close(
        trained(Net(width=0), options), trained(Net(), options), rtol=0, atol=0
    )


@pytest.mark.parametrize("shape", [(6, 8), (6, 5, 8)], ids=["vectors", "sequences"])
def test_the_bias_of_a_layer_without_inputs_has_samples(shape):
    class Behind(Net):
        def __init__(self):
            super().__init__(width=0)
            self.behind = nn.Linear(0, 3).double()

        def forward(self, x):
            hidden = self.first(x).relu()
            out = self.last(hidden) + self.behind(self.empty(hidden))
            return out.flatten(1, -2).mean(1) if out.ndim > 2 else out

    model, x = Behind(), torch.randn(shape, dtype=torch.float64)
    y = torch.randint(3, (6,))
    rows = dome.per_sample_gradients(model, cross_entropy, x, y)
    torch.testing.assert_close(rows, per_sample_loop(model, cross_entropy, x, y))


def test_a_model_of_empty_parameters_alone_has_nothing_to_filter():
    with pytest.raises(ValueError, match="nothing to filter"):
        dome.GradientFilter(nn.Linear(4, 0), rank=1)


def test_empty_parameters_need_no_noise():
    model = Net(width=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dome.privacy.attach(
        model, optimizer, 0, 1.0, 1.0, sample_rate=0.1, basis="released"
    )
    assert private.epsilon(1e-5) == 0
    model.added = nn.Parameter(torch.zeros(1))
    with pytest.raises(dome.privacy.PrivacyError, match="'added' can be trained"):
        private.epsilon(1e-5)
