import pytest
import torch
from torch import nn

import dome
from dome.parameters import LAYOUTS, Block, Layout


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.encoder = nn.Linear(3, 4)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = self.encoder.weight


def test_shared_parameters_are_taken_once_and_order_is_that_of_the_model():
    model = Tied()
    layout = Layout(model)
    assert [slot.name for slot in layout.slots] == [
        "scale",
        "encoder.weight",
        "encoder.bias",
        "decoder.bias",
    ]
    assert layout.dim == sum(p.numel() for p in model.parameters()) == 22


def one_block_a_parameter(slots):
    return tuple(Block(slot.name, slot.start, slot.stop) for slot in slots)


def test_a_layout_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setitem(LAYOUTS, "parameterwise", one_block_a_parameter)  # the line
    grad_filter = dome.GradientFilter(Tied(), rank=2, layout="parameterwise")
    trackers = grad_filter.trackers
    assert list(trackers) == ["scale", "encoder.weight", "encoder.bias", "decoder.bias"]
    assert [len(t.basis) for t in trackers.values()] == [2, 12, 4, 4]
    with pytest.raises(ValueError, match="'layerwise', 'parameterwise'"):
        dome.GradientFilter(Tied(), rank=2, layout="sideways")


def test_layers_are_contiguous_blocks_that_cover_everything():
    blocks = Layout(Tied(), "layerwise").blocks
    assert [(b.name, b.start, b.stop) for b in blocks] == [
        ("scale", 0, 2),
        ("encoder", 2, 18),
        ("decoder", 18, 22),
    ]


def test_gathering_and_scattering_are_inverse_and_missing_gradients_are_zero():
    model = Tied()
    layout = Layout(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    model.encoder.bias.grad = None
    vector = layout.gather()
    assert not vector[14:18].any()
    layout.scatter_(2 * vector)
    torch.testing.assert_close(layout.gather(), 2 * vector)
    assert model.encoder.bias.grad is None


def test_frozen_parameters_are_left_out():
    model = Tied()
    model.encoder.requires_grad_(False)
    assert [slot.name for slot in Layout(model).slots] == ["scale", "decoder.bias"]


def test_layers_that_alternate_in_the_vector_stay_separate_blocks():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.a = nn.Parameter(torch.zeros(1))
            self.inner.child = nn.Linear(1, 1)
            self.z = nn.Parameter(torch.zeros(1))

    names = [b.name for b in Layout(Split(), "layerwise").blocks]
    assert len(names) == len(set(names))


def test_lazy_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(ValueError, match="parameter 'weight' has no shape yet"):
        Layout(nn.LazyLinear(3))


@pytest.mark.parametrize(
    "others", [[], [nn.Linear(2, 3)]], ids=["alone", "with others"]
)
def test_a_sparse_gradient_becomes_dense(others):
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), *others)
    model(torch.tensor([1, 3])).sum().backward()
    expected = model[0].weight.grad.to_dense()
    layout = Layout(model)
    torch.testing.assert_close(layout.gather()[:10].view(5, 2), expected)
    layout.scatter_(torch.ones(layout.dim))
    assert torch.equal(model[0].weight.grad, torch.ones(5, 2))


def test_a_model_moved_after_attaching_is_named():
    model = nn.Linear(2, 2)
    layout = Layout(model)
    layout.parameters = tuple(nn.Linear(2, 2, device="meta").parameters())
    with pytest.raises(RuntimeError, match="on meta, the basis on cpu: move the model"):
        layout.gather()


def test_a_gathered_gradient_is_a_copy_also_of_a_single_parameter():
    model = nn.Linear(3, 2, bias=False)
    model.weight.grad = torch.ones(2, 3)
    gathered = Layout(model).gather()
    model.weight.grad.zero_()
    assert bool(gathered.all())
