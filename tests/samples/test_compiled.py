import pytest
import torch
from samples.loop import per_sample_loop, sum_loss
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.fixture
def compiler():
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # torch's, of its own modules
@pytest.mark.slow  # loads the compiler
@pytest.mark.parametrize(
    ("backend", "in_place"),
    [("aot_eager", False), ("aot_eager", True), ("inductor", False)],
    ids=["aot_eager", "aot_eager in place", "inductor"],
)
def test_a_model_compiled_after_attaching_gives_exact_rows(backend, in_place):
    model, x = network(), torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    compiled = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        model.zero_grad()
        sum_loss(compiled(x)).backward()
        rows = source.take()
        assert_close(rows.sum(0), Layout(model).gather())
    source.detach()
    plain = network()
    plain.load_state_dict(model.state_dict())
    assert_close(rows, per_sample_loop(plain, [x]))


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # loads the compiler
def test_passes_that_are_not_captured_run_compiled():
    model, x, seen = network(), torch.randn(4, 3), []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    source = PerSample(model, Layout(model))
    compiled = torch.compile(model, backend=backend)
    sum_loss(compiled(x)).backward()
    before = len(seen)
    source.arm(False)
    compiled(x)
    assert len(seen) > before
    source.detach()
