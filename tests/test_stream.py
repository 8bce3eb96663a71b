import itertools

import pytest
import torch
from models import batches
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

import dome


class Net(nn.Module):
    """Layers that are shared, left out, frozen, or uncaptured, of all sizes."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.shared = nn.Linear(24, 24)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(24))
        self.head = nn.Linear(24, 3)
        self.checkpointed = checkpointed

    def middle(self, h):
        return self.shared(torch.tanh(self.shared(self.norm(h)))) * self.scale

    def forward(self, x):
        h = self.first(x).relu()
        if self.checkpointed:
            h = checkpoint(self.middle, h, use_reentrant=False)
        else:
            h = self.middle(h)
        # The first layer's weight once more.
        return self.head(h) + linear(h, self.first.weight.T)[:, :3]


def trained(stream, data, dtype=torch.float32, model=None, lr=0.05, **options):
    torch.manual_seed(0)
    model = (model or Net()).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    grad_filter = dome.attach(
        model, optimizer, layout="layerwise", stream=stream, **{"rank": 5} | options
    )
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
    return model, grad_filter


def same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        # NaN has many bits, and is one answer.
        assert torch.equal(value.nan_to_num(nan=7.0), other[name].nan_to_num(nan=7.0))


OPTIONS = {
    "power": {},
    "float64": {"dtype": torch.float64},
    "svd": {"tracker": "svd"},
    "oversampled": {"oversample": 3, "forget": 0.2},
    "bfloat16": {"basis_dtype": torch.bfloat16},
    "now and then": {"update_every": 2, "warmup": 2, "strength": 0.5},
    "a layer by name": {"rank": {"shared": 4, "head": 2}},
    "checkpointed": {"model": "checkpointed"},
    "sums": {"loss_reduction": "sum"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_bit_is_that_of_rows_that_are_kept(options, rng):
    data = [*batches(rng, 5, size=13), *batches(rng, 1, size=4)]
    states = []
    for stream in (False, True):
        own = dict(options)
        if "model" in own:
            torch.manual_seed(0)
            own["model"] = Net(checkpointed=True)
        model, grad_filter = trained(stream, data, **own)
        states.append((model.state_dict(), grad_filter.state_dict()))
        stats = grad_filter.stats
        assert stats.step == len(data)
    same_bits(states[0][0], states[1][0])
    same_bits(states[0][1], states[1][1])


@pytest.mark.parametrize("threads", [1, 2])
def test_large_layers_get_the_same_bits_too(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        states = []
        for stream in (False, True):
            torch.manual_seed(0)
            wide = nn.Sequential(nn.Linear(8, 301), nn.Tanh(), nn.Linear(301, 203))
            model = nn.Sequential(wide, nn.Tanh(), nn.Linear(203, 3))
            data = batches(torch.Generator().manual_seed(3), 4, size=33)
            _, grad_filter = trained(stream, data, model=model, rank=17)
            states.append(grad_filter.state_dict())
        same_bits(*states)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:dome left a batch out")
@pytest.mark.parametrize("size", [1, 13])
def test_a_layer_whose_samples_are_not_finite_is_left_out_as_without(size):
    states = []
    for stream in (False, True):
        torch.manual_seed(0)
        model, data = Net(), batches(torch.Generator().manual_seed(5), 3, size=size)
        # Infinite in the layers before the norm, and in none behind it.
        if size > 1:
            model.norm.register_full_backward_hook(
                lambda module, inputs, outputs: (inputs[0] * torch.inf,)
            )
        _, grad_filter = trained(stream, data, model=model, lr=0.0)
        stats = grad_filter.stats
        assert stats.skipped_updates
        states.append(grad_filter.state_dict())
    same_bits(*states)


def test_a_layer_is_used_before_backward_is_over_and_its_memory_is_the_next_ones(rng):
    torch.manual_seed(0)
    sizes = [8, 40, 30, 20, 10, 3]
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in itertools.pairwise(sizes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=2, layout="layerwise", stream=True)
    rows, seen = grad_filter._source.rows, []
    use = rows._use

    def watched(name, block):
        seen.append((name, model[0].weight.grad is None, len(rows._groups)))
        use(name, block)

    rows._use = watched
    for x, y in batches(rng, 3, size=9):
        optimizer.zero_grad()
        cross_entropy(model(x.float()), y).backward()
        assert [name for name, _, _ in seen] == list("43210")
        # Others are not there at the same time, and the first weight has no gradient.
        assert all(early and not others for _, early, others in seen[:-1])
        optimizer.step()
        seen.clear()
    held = sum(flat.numel() for flat in rows._spare)
    largest = max(block.dim for block in grad_filter._layout.blocks)
    # One buffer for the largest layer, with a cache line for every row at most.
    assert held <= 9 * (largest + 16) + 16


def second_backward(model, optimizer, loss):
    loss(model).backward()
    loss(model).backward()


def retained(model, optimizer, loss):
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()


def skipped(model, optimizer, loss):
    loss(model).backward()
    optimizer.zero_grad()
    loss(model).backward()


def thrown_away(model, optimizer, loss):
    loss(model).backward()
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize(
    "run", [second_backward, retained, skipped, thrown_away], ids=lambda f: f.__name__
)
def test_a_second_backward_pass_before_the_step_is_an_error_that_says_why(run, rng):
    (x, y), *_ = batches(rng, 1, size=6)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=2, layout="layerwise", stream=True)
    with pytest.raises(RuntimeError, match=r"stream=True.* use samples during .*step"):
        run(model, optimizer, lambda m: cross_entropy(m(x), y))
    with pytest.raises(RuntimeError, match="observe"):
        grad_filter.observe(torch.randn(4, grad_filter._layout.dim))


def test_samples_of_another_number_in_one_backward_pass_are_refused(rng):
    (x, y), *_ = batches(rng, 1, size=6)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=2, layout="layerwise", stream=True)
    loss = cross_entropy(model(x), y) + cross_entropy(model(x[:4]), y[:4])
    with pytest.raises(RuntimeError, match="samples of another number"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": "microbatch"}, 'needs samples="per_sample"'),
        ({"scaler": torch.amp.GradScaler("cpu")}, "GradScaler can skip the step"),
        ({"direction_rank": 2}, "no rows to stream"),
        ({"layout": "global"}, 'needs layout="layerwise".* direction_rank=4'),
    ],
)
def test_options_that_do_not_go_with_a_stream_are_refused(options, message):
    model = Net()
    with pytest.raises(ValueError, match=message):
        dome.GradientFilter(
            model, 2, **{"layout": "layerwise", "stream": True} | options
        )


def test_a_use_that_was_not_captured_is_found(rng):
    (x, y), *_ = batches(rng, 1, size=6)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=2, layout="layerwise", stream=True)
    hidden = model.first(x).relu()
    (cross_entropy(model(x), y) + hidden.square().mean()).backward()
    with pytest.raises(RuntimeError, match=r"'first\.weight' miss a part"):
        optimizer.step()


def test_nothing_is_left_on_the_parameters_between_steps(rng):
    model, grad_filter = trained(True, batches(rng, 2, size=6))
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)
    model(torch.randn(6, 8)).sum().backward()
    grad_filter.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
