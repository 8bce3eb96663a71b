import warnings

import pytest
import torch
from models import batches
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import dome

# aot_eager traces as inductor does, and needs no C++ compiler.
BACKEND = {"backend": "aot_eager"}
pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Of one's own: torch 2.13 compiles no nn.Sequential as one graph."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        return self.inner(x).tanh()


class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = Block()
        self.head = nn.Linear(16, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        h = self.first(x)
        if self.checkpointed:
            h = checkpoint(self.block, h, use_reentrant=False)
        else:
            h = self.block(h)
        return self.head(h)


def block(model, **how):
    model.block.compile(**how)


def layer(model, **how):
    model.block.inner[1].compile(**how)


def replaced(model, **how):
    model.block = torch.compile(model.block, **how)


def forward_of_block(model, **how):
    model.block.forward = torch.compile(model.block.forward, **how)


def whole(model, **how):
    return torch.compile(model, **how)


def in_place(model, **how):
    model.compile(**how)


def function(model, **how):
    def run(x):
        return model(x)

    return torch.compile(run, **how)


def trained(rng_seed, compiled=None, how=BACKEND, checkpointed=False, **options):
    torch.manual_seed(0)
    model = Net(checkpointed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, **{"rank": 4} | options)
    call = compiled(model, **how) if compiled else None
    call = model if call is None else call
    data = list(batches(torch.Generator().manual_seed(rng_seed), 4))
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(call(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        return call(data[0][0]), [p.detach() for p in model.parameters()]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    # Torch warns of itself, where warnings are errors as here: of .grad of a tensor
    # that is no leaf. What counts is what the compiler says of dome.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not [w for w in said if "ynamo" in str(w.message)]


WAYS = [block, layer, replaced, forward_of_block, whole, in_place, function]


@pytest.mark.parametrize("options", [{}, {"update_every": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_attached_then_compiled_trains_alike_without_a_warning(way, options):
    torch.testing.assert_close(trained(1, way, **options), trained(1, **options))


@pytest.mark.parametrize("way", [block, replaced, forward_of_block])
def test_parts_may_be_compiled_as_one_graph_each(way):
    how = BACKEND | {"fullgraph": True}
    options = {"update_every": 2}
    torch.testing.assert_close(trained(1, way, how, **options), trained(1, **options))


def test_a_compiled_block_in_a_checkpoint_is_computed_again_alike():
    torch.testing.assert_close(
        trained(1, block, checkpointed=True), trained(1, checkpointed=True)
    )


@pytest.mark.parametrize("way", [whole, in_place])
def test_a_model_may_be_compiled_as_one_graph(way):
    how = BACKEND | {"fullgraph": True}
    options = {"update_every": 2}
    torch.testing.assert_close(trained(1, way, how, **options), trained(1, **options))


def test_one_graph_around_a_call_of_the_model_is_refused_in_our_words():
    with pytest.raises(Exception, match="compile parts of the model with it"):
        trained(1, function, BACKEND | {"fullgraph": True})


def test_the_switch_for_compiled_autograd_changes_nothing():
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.testing.assert_close(trained(1, whole), trained(1))


@pytest.mark.parametrize("options", [{}, {"samples": "microbatch"}])
def test_compiled_autograd_is_refused_in_our_words(options):
    compiler = torch.compile(backend="eager")
    with (
        torch._dynamo.compiled_autograd._enable(compiler),
        pytest.raises(RuntimeError, match="runs under compiled autograd"),
    ):
        trained(1, **options)


def test_blocks_are_compiled_again_after_a_captured_pass():
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    trained(1, block, {"backend": backend}, update_every=4)
    assert calls
