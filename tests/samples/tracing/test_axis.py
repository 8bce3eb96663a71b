import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples.models import Then
from torch import nn

from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.tracing.axis import Axis


@st.composite
def batched(draw):
    outer, batch, inner = (draw(st.integers(1, 3)) for _ in range(3))
    before, after = (draw(st.lists(st.integers(1, 3), max_size=2)) for _ in range(2))
    axis = Axis(len(before), batch, inner)
    shape = (*before, outer * batch * inner, *after)
    samples = torch.arange(outer * batch * inner) // inner % batch
    return axis, samples.view(-1, *(1,) * len(after)).expand(shape).contiguous()


def labels(axis, shape):
    index = torch.arange(shape[axis.dim]) // axis.inner % axis.batch
    return index.view(-1, *(1,) * (len(shape) - axis.dim - 1)).expand(shape)


@given(batched(), st.data())
def test_a_reshape_keeps_every_entry_with_its_sample(pair, data):
    axis, samples = pair
    factors = [n for size in samples.shape for n in prime_factors(size)]
    order = [*factors]
    shape = [1]
    for factor in order:
        if data.draw(st.booleans()):
            shape.append(1)
        shape[-1] *= factor
    moved = axis.reshaped(samples.shape, shape)
    if moved is not None:
        assert torch.equal(labels(moved, shape), samples.reshape(shape))
    else:
        assert all(
            not torch.equal(
                labels(Axis(dim, axis.batch, inner), shape), samples.reshape(shape)
            )
            for dim, size in enumerate(shape)
            for inner in range(1, size + 1)
            if size % (axis.batch * inner) == 0
        )


def prime_factors(number):
    return next(
        (
            [p, *prime_factors(number // p)]
            for p in range(2, number + 1)
            if number % p == 0
        ),
        [],
    )


@given(batched())
def test_samples_first_gathers_what_belongs_to_each_sample(pair):
    axis, samples = pair
    rows = axis.samples_first(samples[..., None])
    expected = torch.arange(axis.batch).view(-1, 1, 1).expand(rows.shape)
    assert torch.equal(rows, expected)


# A square batch: every size is 4, so that nothing can be told by size alone.
MOVES = {
    "transpose": (lambda x: x.transpose(0, 1), 1),
    "permute": (lambda x: x.permute(2, 0, 1), 1),
    "movedim": (lambda x: x.movedim(0, -1), 2),
    "unsqueeze": (lambda x: x[None], 1),
    "select": (lambda x: x[:, 1], 0),
    "select after transpose": (lambda x: x.transpose(0, 1)[-1], 0),
    "new axis and ellipsis": (lambda x: x[None, ..., 0], 1),
    "mean over the last": (lambda x: x.mean(-1), 0),
    "mean over time": (lambda x: x.transpose(0, 1).mean(0), 0),
    "softmax": (lambda x: x.softmax(0 + 1), 0),
    "max values": (lambda x: x.max(2).values, 0),
    "einsum": (lambda x: torch.einsum("bij->ijb", x), 2),
    "matmul with itself": (lambda x: x @ x.mT, 0),
    "unbind": (lambda x: x.unbind(1)[2], 0),
    "chunk": (lambda x: x.chunk(2, 2)[0], 0),
    "indexed elsewhere": (lambda x: x[:, torch.tensor([0, 0, 1, 3])], 0),
    "broadcast to more": (lambda x: x + torch.zeros(4, 1, 4, 4), 1),
    "repeat": (lambda x: x.repeat(2, 1, 1, 1), 1),
    "flip over time": (lambda x: x.flip(1), 0),
    "flip over samples": (lambda x: x.flip(0), None),
    "shuffled samples": (lambda x: x[torch.tensor([3, 1, 2, 0])], None),
    "some samples": (lambda x: x[1:], None),
    "sorted over samples": (lambda x: x.sort(0).values, None),
    "cumulative over time": (lambda x: x.cumsum(1), 0),
    "stacked": (lambda x: torch.stack([x, x]), 1),
    "one hot": (lambda x: nn.functional.one_hot((x > 0).long()), 0),
}


@pytest.mark.parametrize(("move", "dim"), MOVES.values(), ids=MOVES.keys())
def test_the_axis_is_followed_where_sizes_say_nothing(move, dim):
    found = []

    def run(m, x):
        y = move(x)
        found.append(source._capture._mode.trace.axis(y))
        return x * m.scale

    model = Then(run, scale=nn.Parameter(torch.ones(4)))
    source = PerSample(model, Layout(model))
    model(torch.randn(4, 4, 4))
    assert (None if found[0] is None else found[0].dim) == dim


def test_a_tensor_without_entries_holds_samples_too():
    # As compressed keys do, of sentences too short to be compressed.
    assert Axis(0, 3).reshaped((3, 0, 4), (3, 1, 0, 4)) == Axis(0, 3)
    assert Axis(1, 3).reshaped((0, 3, 4), (1, 0, 3, 4)) == Axis(2, 3)
