import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss
from samples.models import Then
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.tracing import trace
from dome.samples.tracing.moves import follow, unmoved
from dome.samples.tracing.origins import Step

pytestmark = pytest.mark.usefixtures("float64")

B = 4

# Every size is 4, so that no shape tells the samples from the rest.
KEEPING = {
    "relu": F.relu,
    "in place": lambda h: (h * 1).mul_(2).add_(h),
    "sum": lambda h: h + h.tanh(),
    "numbers": lambda h: (2 - h).sigmoid() ** 2,
    "constants": lambda h: torch.ones_like(h) * h,
    "where": lambda h: torch.where(h > 0, h, -h),
    "clamp": lambda h: h.clamp(min=0.1).sqrt(),
    "masked": lambda h: h.masked_fill(h.detach() < 0, 0.5),
    "types": lambda h: h.float().double().contiguous().clone(),
    "gelu": lambda h: F.gelu(h) / 2,
    "into zeros": lambda h: torch.zeros(h.shape).add_(h),
    "empty memory": lambda h: torch.empty_like(h).fill_(2.0) * h,
    "noise": lambda h: 0 * torch.empty_like(h).uniform_(0.9, 1.1) + h,
}
MOVING = {
    "permute": lambda h: h.permute(1, 2, 0).tanh().permute(2, 0, 1),
    "permute of a list": lambda h: h.permute([1, 2, 0]).permute((-1, 0, 1)),
    "permute by name": lambda h: h.permute(dims=(1, 0, 2)).permute(dims=(1, 0, 2)),
    "transpose": lambda h: h.transpose(0, -1).sin().transpose(-1, 0),
    "transpose elsewhere": lambda h: h.transpose(1, 2),
    "transpose by name": lambda h: h.transpose(dim0=0, dim1=1).transpose(1, 0),
    "swapaxes": lambda h: torch.swapaxes(h, 0, 1).swapaxes(0, 1),
    "unbind": lambda h: h.unbind(1)[2] + h.unbind(-1)[0],
    "unbind in front": lambda h: h.transpose(0, 1).unbind()[1],
    "taken apart": lambda h: torch.stack(tuple(h.permute(1, 0, 2)), 1),
    "stack in front": lambda h: torch.stack([h, h.tanh()]).sum(0),
    "stack behind": lambda h: torch.stack([h, h.tanh()], -1).sum(-1),
    "stack by name": lambda h: torch.stack(tensors=[h, h.tanh()], dim=1).sum(1),
    "stack with constants": lambda h: torch.stack([h, torch.ones_like(h)]).prod(0),
    "stack of the transposed": lambda h: torch.stack([h.mT, h.mT]).transpose(0, 1)[
        :, 0
    ],
    "scatter elsewhere": lambda h: torch.zeros(len(h), 6, 4).scatter_reduce(
        1, SPOTS[:, None].expand(h.shape), h, "amax", include_self=False
    ),
    "index_add elsewhere": lambda h: torch.zeros(len(h), 6, 4).index_add(1, SPOTS, h),
    "matmul": lambda h: h @ h.mT.softmax(-1),
    "matmul of more": lambda h: (h[:, None] @ h[:, None].mT)[:, 0],
    "matmul with constants": lambda h: torch.ones(4, 4) @ h,
}
SPOTS = torch.tensor([4, 0, 4, 1])  # and none of 2, 3 and 5


def model_that(change):
    torch.manual_seed(0)
    return Then(
        lambda m, x: m.head(change(m.layer(x))),
        layer=nn.Linear(4, 4),
        head=nn.Linear(4, 4),
    )


def rows_of(model, x):
    source = PerSample(model, Layout(model))
    sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    return rows


@pytest.mark.parametrize("change", KEEPING.values(), ids=KEEPING.keys())
def test_the_short_way_finds_what_the_long_one_finds(change, monkeypatch):
    pairs = []

    def both(call, out):
        found = unmoved(call, out)
        if found is not None:
            known = call.known()
            args = (call.func, call.args, call.kwargs, known, *known[0])
            step = Step(*args, out, out, 0, lambda _: found, {})
            pairs.append((found, follow(step)))
        return found

    monkeypatch.setattr(trace, "unmoved", both)
    model, x = model_that(change), torch.randn(B, 4, 4)
    rows = rows_of(model, x)
    assert pairs
    for short, long in pairs:
        assert long.is_fine
        assert short.place == long.place
    assert_close(rows, per_sample_loop(model, [x]))


@pytest.mark.parametrize("change", MOVING.values(), ids=MOVING.keys())
def test_samples_are_followed_where_they_move(change):
    model, x = model_that(change), torch.randn(B, 4, 4)
    assert_close(rows_of(model, x), per_sample_loop(model, [x]))


def test_tensors_that_hold_their_samples_in_other_places_are_not_stacked():
    model = model_that(lambda h: torch.stack([h, h.transpose(0, 1)], 2).sum(2))
    with pytest.raises(RuntimeError, match=r"'head\.weight'"):
        rows_of(model, torch.randn(B, 4, 4))


def test_scattered_rows_are_stacked():
    picked = torch.tensor([2, 0, 3, 1])

    def change(h):
        rows = picked if len(h) == B else torch.tensor([0])
        mine = h[rows] * 2
        twice = torch.stack([mine, mine]).sum(0)
        return torch.empty_like(mine).index_copy(0, rows, twice)

    model, x = model_that(change), torch.randn(B, 4)
    assert_close(rows_of(model, x), per_sample_loop(model, [x]))


def test_one_sample_alone_lies_along_every_dimension():
    model = Then(
        lambda m, x: m.up(m.layer(x).transpose(0, 1).reshape(1, 4, 5)),
        layer=nn.Linear(5, 5),
        up=nn.ConvTranspose1d(4, 2, 3),
    )
    x = torch.randn(1, 4, 5)
    assert_close(rows_of(model, x), per_sample_loop(model, [x]))
