import torch
from samples.models import B, Then, sequence, vector
from torch import nn


class Attends(nn.Module):
    def __init__(self, *, cross=False, options=None, **settings):
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, **settings)
        self.cross, self.options = cross, options or {}

    def forward(self, x, *others):
        key, value = others if self.cross else (x, x)
        out, weights = self.layer(x, key, value, **self.options)
        return out if weights is None else (out, weights)


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent(kind, **settings):
    return Then(lambda m, x: m.layer(x)[0], layer=kind(3, 4, **settings))


def cell(kind):
    def run(m, x):
        state = None
        for step in x.unbind(1):
            state = m.layer(step, state)
        return state

    return Then(run, layer=kind(3, 4))


def own_recurrence():
    def run(m, x):
        h = torch.zeros(len(x), 4)
        for step in x.unbind(1):
            h = torch.tanh(m.inner(step) + m.outer(h))
        return h

    return Then(run, inner=nn.Linear(3, 4), outer=nn.Linear(4, 4))


SEQUENCES = {
    "rnn": lambda: (recurrent(nn.RNN, batch_first=True), sequence(B, B, 3)),
    "rnn relu": lambda: (
        recurrent(nn.RNN, nonlinearity="relu", num_layers=2, batch_first=True),
        sequence(B, 5, 3),
    ),
    "gru": lambda: (
        recurrent(nn.GRU, num_layers=2, bidirectional=True, batch_first=True),
        sequence(B, B, 3),
    ),
    "gru without bias": lambda: (
        recurrent(nn.GRU, bias=False, batch_first=True),
        sequence(B, 5, 3),
    ),
    "lstm": lambda: (
        recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        sequence(B, B, 3),
    ),
    "lstm with projection": lambda: (
        recurrent(nn.LSTM, proj_size=2, num_layers=2, batch_first=True),
        sequence(B, 5, 3),
    ),
    "lstm without bias": lambda: (
        recurrent(nn.LSTM, bias=False, proj_size=2, batch_first=True),
        sequence(B, 5, 3),
    ),
    "lstm final state into linear": lambda: (
        Then(
            lambda m, x: m.head(m.layer(x)[1][0][-1]),
            layer=nn.LSTM(3, 4, batch_first=True),
            head=nn.Linear(4, 2),
        ),
        sequence(B, 5, 3),
    ),
    "gru with a learned start": lambda: (
        Then(
            lambda m, x: m.layer(x, m.h.expand(2, len(x), 4)),
            layer=nn.GRU(3, 4, 2, batch_first=True),
            h=vector(2, 1, 4),
        ),
        sequence(B, 5, 3),
    ),
    "gru cell with a learned start": lambda: (
        Then(
            lambda m, x: m.layer(
                x, m.layer(x.new_zeros(len(x), 3), m.h.expand(len(x), 4))
            ),
            layer=nn.GRUCell(3, 4),
            h=vector(1, 4),
        ),
        sequence(B, 3),
    ),
    "rnn cell": lambda: (cell(nn.RNNCell), sequence(B, 3, 3)),
    "gru cell": lambda: (cell(nn.GRUCell), sequence(B, 3, 3)),
    "lstm cell": lambda: (cell(nn.LSTMCell), sequence(B, 3, 3)),
    "own recurrence from zeros": lambda: (own_recurrence(), sequence(B, B, 3)),
    "attention": lambda: (Attends(batch_first=True), sequence(B, B, 6)),
    "attention without weights": lambda: (
        Attends(batch_first=True, options={"need_weights": False}),
        sequence(B, 5, 6),
    ),
    "attention without bias": lambda: (
        Attends(bias=False, batch_first=True),
        sequence(B, 5, 6),
    ),
    "attention to others": lambda: (
        Attends(cross=True, kdim=4, vdim=3, batch_first=True),
        [torch.randn(B, 5, 6), torch.randn(B, 7, 4), torch.randn(B, 7, 3)],
    ),
    "attention with bias rows": lambda: (
        Attends(add_bias_kv=True, add_zero_attn=True, batch_first=True),
        sequence(B, 5, 6),
    ),
    "attention with a mask": lambda: (
        Attends(
            batch_first=True,
            options={"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        ),
        sequence(B, 5, 6),
    ),
    "attention with padding": lambda: (
        Then(
            lambda m, x, pad: m.layer(
                x, x, x, key_padding_mask=pad, need_weights=False
            )[0],
            layer=nn.MultiheadAttention(6, 2, batch_first=True),
        ),
        [
            torch.randn(B, 5, 6),
            torch.arange(5)[None] > torch.tensor([[1], [4], [2], [3]]),
        ],
    ),
    "transformer": lambda: (encoder(True), sequence(B, B, 6)),
    "transformer with a square mask of zeros": lambda: (
        Then(
            lambda m, x, mask: m.layer(x, mask=mask.new_ones(B, B).triu(1)),
            layer=encoder(True),
        ),
        [torch.randn(B, B, 6), torch.zeros(1, 1)],
    ),
    "encoder and decoder": lambda: (
        Then(
            lambda m, x, y: m.layer(x, y),
            layer=nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True),
        ),
        [torch.randn(B, B, 6), torch.randn(B, 3, 6)],
    ),
    "transformer in evaluation mode": lambda: (encoder(True).eval(), sequence(B, 5, 6)),
}

TIME_FIRST = {
    "rnn": lambda: (recurrent(nn.RNN), sequence(5, B, 3)),
    "gru": lambda: (recurrent(nn.GRU, bidirectional=True), sequence(B, B, 3)),
    "lstm": lambda: (recurrent(nn.LSTM, num_layers=2), sequence(B, B, 3)),
    "attention": lambda: (Attends(), sequence(B, B, 6)),
    "transformer": lambda: (encoder(False), sequence(B, B, 6)),
    "longer transformer": lambda: (encoder(False), sequence(5, B, 6)),
    "mean over time": lambda: (
        Then(
            lambda m, x: m.head(m.layer(x).mean(0)),
            layer=nn.Linear(3, B),
            head=nn.Linear(B, B),
        ),
        sequence(B, B, 3),
    ),
    "last step": lambda: (
        Then(
            lambda m, x: m.head(m.layer(x)[-1]),
            layer=nn.Linear(3, B),
            head=nn.Linear(B, 2),
        ),
        sequence(B, B, 3),
    ),
}
