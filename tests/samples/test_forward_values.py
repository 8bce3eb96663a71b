import contextlib

import pytest
import torch
import torch.nn.functional as F
from samples.loop import tensors_in
from samples.models import B, Then, built, images, sequence, vector, words
from samples.rules.test_contract import CASES
from torch import nn

from dome.parameters import Layout
from dome.samples import PerSample


def shifted_views(m, x):
    x = m.layer(x)
    x[:, 0] += m.shift
    x.view(-1)[: len(m.shift)].mul_(m.shift[0])
    return x


def of_one_memory(m, x):
    wide, _ = torch.broadcast_tensors(x, m.shift)
    return wide + 1, wide.data_ptr() - x.data_ptr() + torch.zeros(())


VALUES = {
    "lstm that drops": lambda: (
        nn.LSTM(3, 4, num_layers=3, dropout=0.5, batch_first=True),
        sequence(B, 5, 3),
    ),
    "gru both ways that drops": lambda: (
        nn.GRU(3, 4, num_layers=2, dropout=0.5, bidirectional=True, batch_first=True),
        sequence(B, 5, 3),
    ),
    "attention that drops, with a learned bias": lambda: (
        Then(
            lambda m, x: F.scaled_dot_product_attention(x, x, x, m.bias, 0.5),
            bias=vector(2, 5, 5),
        ),
        sequence(B, 2, 5, 3),
    ),
    "encoder that drops": lambda: (
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True),
        sequence(B, 5, 6),
    ),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)).to(
            memory_format=torch.channels_last
        ),
        [images()[0].to(memory_format=torch.channels_last)],
    ),
    "instance norm that counts": lambda: (
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        images(),
    ),
    "instance norm that counts, without weights": lambda: (
        nn.Sequential(
            nn.InstanceNorm2d(3, track_running_stats=True), nn.Conv2d(3, 4, 3)
        ),
        images(),
    ),
    "a number times half precision": lambda: (
        Then(
            lambda m, x: x.bfloat16() * m.scale + m.shift[0],
            scale=vector(),
            shift=vector(2),
        ),
        sequence(B, 3),
    ),
    "views written in place": lambda: (
        Then(shifted_views, layer=nn.Linear(3, 4), shift=vector(4)),
        sequence(B, 5, 3),
    ),
    "views of the arguments": lambda: (
        Then(of_one_memory, shift=vector(5, 1, 3)),
        sequence(B, 3),
    ),
    "table with a largest norm": lambda: (nn.Embedding(7, 3, max_norm=0.5), words()),
    "bags with a largest norm": lambda: (nn.EmbeddingBag(7, 3, max_norm=0.5), words()),
    "cells": lambda: (
        Then(
            lambda m, x: (m.a(x), *m.b(x), m.c(x)),
            a=nn.GRUCell(3, 4),
            b=nn.LSTMCell(3, 4),
            c=nn.RNNCell(3, 4),
        ),
        sequence(B, 3),
    ),
    "draws after a weight": lambda: (
        Then(lambda m, x: F.dropout(F.rrelu(x @ m.w, training=True)), w=vector(3)),
        sequence(B, 5, 3),
    ),
}
SETTINGS = {
    "float32": (torch.float32, True, contextlib.nullcontext),
    "float64": (torch.float64, True, contextlib.nullcontext),
    "eval": (torch.float32, False, contextlib.nullcontext),
    "autocast": (torch.float32, True, lambda: torch.autocast("cpu", torch.bfloat16)),
}
EVERYTHING = CASES | {name: (make, 0) for name, make in VALUES.items()}


def run(model, inputs, precision):
    torch.manual_seed(1)
    with precision():
        output = tensors_in(model(*inputs))
    state = [*output, *model.state_dict().values(), torch.get_rng_state()]
    return state, [t.stride() for t in output]


def assert_same_bits(found, expected):
    for own, plain in zip(found, expected, strict=True):
        assert own.dtype == plain.dtype
        assert torch.equal(own.nan_to_num(), plain.nan_to_num())
        assert torch.equal(own.isnan(), plain.isnan())


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:LSTM with")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("make", "batch_dim"), EVERYTHING.values(), ids=EVERYTHING.keys()
)
def test_forward_values_are_those_without_a_filter(make, batch_dim, setting):
    dtype, training, precision = SETTINGS[setting]
    torch.set_default_dtype(dtype)
    try:
        plain, model, inputs = built(make)
    finally:
        torch.set_default_dtype(torch.float32)
    for m in (*plain.modules(), *model.modules()):
        m.training = m.training and training
    try:
        expected, strides = run(plain, inputs, precision)
    except RuntimeError as error:
        pytest.skip(f"plain torch: {error}")
    source = PerSample(model, Layout(model), batch_dim=batch_dim)
    found, own_strides = run(model, inputs, precision)
    source.detach()
    assert_same_bits(found, expected)
    assert own_strides == strides
