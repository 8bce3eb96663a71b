import pytest
import torch
from samples.loop import per_sample_loop, sum_loss
from samples.models import Then
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")

B = 4


def whole_mixed_then_view(h):
    view = h.view(len(h), 2, 2)
    h.copy_(h.flip(0))
    return view.flatten(1)


def view_mixed_then_other_view(h):
    one, other = h.view(len(h), 2, 2), h.view(len(h), 4)
    del h
    one.copy_(one.flip(0))
    return other


def view_centred_then_whole(h):
    view = h.view(len(h), 2, 2)
    view.sub_(view.mean(0))
    return h


def whole_centred_then_view(h):
    view = h.view(len(h), 2, 2)
    h -= h.mean(0)
    return view.flatten(1)


def detached_then_whole(h):
    h.detach().copy_(h.detach().flip(0))
    return h


def data_then_whole(h):
    h.data.copy_(h.data.flip(0))
    return h


def other_data(h):
    h.data = h.flip(0)
    return h


def real_part_then_whole(h):
    z = torch.complex(h, h)
    z.real.copy_(z.real.flip(0))
    return z.abs()


MIXES = [
    whole_mixed_then_view,
    view_mixed_then_other_view,
    view_centred_then_whole,
    whole_centred_then_view,
    detached_then_whole,
    data_then_whole,
    other_data,
    real_part_then_whole,
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_a_write_is_heard_of_by_all_tensors_in_its_memory(mix):
    # Autograd refuses or loses some of these writes to what has a gradient.
    model = Then(lambda m, x: m.head(mix(x.clone())), head=nn.Linear(4, 3))
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight'.*microbatch"):
        model(torch.randn(B, 4))
    source.detach()


def into_views_of_zeros(m, x):
    memory = torch.zeros(len(x) * 4)
    by_sample, other = memory.view(len(x), 4), memory.view(len(x), 2, 2)
    by_sample.copy_(m.layer(x))
    return m.head(other.flatten(1))


def into_halves(m, x):
    memory = torch.zeros(len(x), 8)
    left, right = memory[:, :4], memory[:, 4:]
    left += m.layer(x)
    return m.head(left) + m.head(right)


def into_what_was_expanded(m, x):
    memory = torch.zeros(len(x), 1)
    wide = memory.expand(len(x), 4)
    memory.copy_(m.layer(x)[:, :1])
    return m.head(wide)


def through_two_views(m, x):
    h = m.layer(x)
    view = h.flatten().view(len(x), 4)
    other = h.view(len(x), 2, 2)
    view.mul_(2.0)
    return m.head(other.flatten(1))


@pytest.mark.parametrize(
    "run",
    [into_views_of_zeros, into_halves, into_what_was_expanded, through_two_views],
    ids=lambda run: run.__name__,
)
def test_samples_written_through_one_view_are_found_in_another(run):
    model, x = Then(run, layer=nn.Linear(4, 4), head=nn.Linear(4, 3)), torch.randn(B, 4)
    source = PerSample(model, Layout(model))
    sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))
