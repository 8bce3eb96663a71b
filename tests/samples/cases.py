import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

B = 4


class Then(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def vector(*shape):
    return nn.Parameter(torch.randn(shape))


def images(channels=3, size=(6, 5)):
    return [torch.randn(B, channels, *size)]


def words(*shape, high=7):
    return [torch.randint(high, shape or (B, 5))]


def frozen(model, *names):
    for name, p in model.named_parameters():
        p.requires_grad_(name not in names)
    return model


def tied():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first)


class Lora(nn.Module):
    def __init__(self, merged):
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.down, self.up, self.merged = vector(2, 5), vector(4, 2), merged

    def forward(self, x):
        if self.merged:
            weight = self.base.weight + 0.5 * (self.up @ self.down)
            return F.linear(x, weight, self.base.bias)
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.down), self.up)


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Tokens(nn.Module):
    def __init__(self, grow):
        super().__init__()
        self.grow, self.cls, self.pos = grow, vector(1, 1, 6), nn.Embedding(B + 1, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = torch.cat([self.grow(self.cls, len(x)), x], dim=1)
        x = x + self.pos(torch.arange(x.shape[1]))
        return self.layer(x)[:, 0]


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


def filled(m, x):
    out = torch.zeros(len(x), 3, 4)
    out[:, 0] = m.start
    out[:, 1:] = m.layer(x)[:, None]
    return m.layer(out)


def bags(mode, **options):
    return nn.EmbeddingBag(7, 3, mode=mode, **options)


def sequence(*shape):
    return [torch.randn(*shape)]


LAYERS = {
    "linear": lambda: (nn.Linear(4, 3), sequence(B, 4)),
    "linear without bias": lambda: (nn.Linear(4, 3, bias=False), sequence(B, 4)),
    "linear on sequences": lambda: (nn.Linear(4, 3), sequence(B, 5, 4)),
    "linear on long sequences": lambda: (nn.Linear(4, 3), sequence(B, 20, 4)),
    "linear on grids": lambda: (nn.Linear(4, 3), sequence(B, 2, 3, 4)),
    "linear on flattened positions": lambda: (
        Then(
            lambda m, x: m.layer(x.reshape(-1, 4)).view(-1, 5, 3), layer=nn.Linear(4, 3)
        ),
        sequence(B, 5, 4),
    ),
    "bilinear": lambda: (
        Then(lambda m, x: m.layer(x, x.sin()), layer=nn.Bilinear(4, 4, 3)),
        sequence(B, 4),
    ),
    "prelu": lambda: (nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), sequence(B, 4)),
    "conv1d": lambda: (nn.Conv1d(3, 4, 3, padding=1), images(size=(7,))),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1), images()),
    "conv2d of many channels": lambda: (nn.Conv2d(9, 4, 3, padding=1), images(9)),
    "conv2d in groups": lambda: (nn.Conv2d(4, 6, 3, groups=2, dilation=2), images(4)),
    "conv2d depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4), images(4)),
    "conv2d same": lambda: (nn.Conv2d(3, 4, (2, 4), padding="same"), images()),
    "conv2d valid": lambda: (nn.Conv2d(3, 4, (2, 3), padding="valid"), images()),
    "conv2d reflecting": lambda: (
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        images(),
    ),
    "conv2d circular same": lambda: (
        nn.Conv2d(3, 4, (2, 3), padding="same", padding_mode="circular"),
        images(),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), images(2, (3, 4, 3))),
    "conv2d on frames": lambda: (
        Then(
            lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, (-1, 3)),
            layer=nn.Conv2d(2, 4, 3),
        ),
        sequence(B, 3, 2, 5, 5),
    ),
    "conv_transpose1d": lambda: (
        nn.ConvTranspose1d(3, 4, 3, stride=2),
        images(size=(5,)),
    ),
    "conv_transpose2d": lambda: (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        images(4),
    ),
    "conv_transpose3d": lambda: (
        nn.ConvTranspose3d(2, 3, 2, dilation=2),
        images(2, (3, 2, 2)),
    ),
    "group norm": lambda: (nn.GroupNorm(2, 6), images(6)),
    "group norm on vectors": lambda: (nn.GroupNorm(2, 6), sequence(B, 6)),
    "layer norm": lambda: (nn.LayerNorm(5), images()),
    "layer norm on images": lambda: (nn.LayerNorm((3, 6, 5)), images()),
    "layer norm without bias": lambda: (nn.LayerNorm(5, bias=False), images()),
    "rms norm": lambda: (nn.RMSNorm((6, 5)), images()),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), images()),
    "batch norm in evaluation mode": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4).eval()),
        images(),
    ),
    "embedding": lambda: (nn.Embedding(7, 3), words()),
    "embedding with padding": lambda: (nn.Embedding(7, 3, padding_idx=-1), words()),
    "embedding with max norm": lambda: (nn.Embedding(7, 3, max_norm=1.0), words()),
    "embedding of single words": lambda: (nn.Embedding(7, 3), words(B)),
    "bag mean": lambda: (bags("mean"), words()),
    "bag sum": lambda: (bags("sum"), words()),
    "bag max": lambda: (bags("max"), words()),
    "bag with padding": lambda: (bags("mean", padding_idx=2), words(high=4)),
    "bag max with padding": lambda: (bags("max", padding_idx=2), words(high=4)),
    "weighted bag": lambda: (
        Then(lambda m, x, w: m.bag(x, per_sample_weights=w), bag=bags("sum")),
        [*words(), torch.randn(B, 5)],
    ),
}

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

PARAMETERS = {
    "scale and shift": lambda: (
        Then(
            lambda m, x: (x * m.scale + m.shift) / m.scale.exp(),
            scale=vector(4),
            shift=vector(3, 1),
        ),
        sequence(B, 3, 4),
    ),
    "scalar": lambda: (Then(lambda m, x: x * m.scale, scale=vector()), sequence(B, 3)),
    "reversed operands": lambda: (
        Then(
            lambda m, x: m.a - x * (m.b / (x.square() + 1)), a=vector(3), b=vector(1, 3)
        ),
        sequence(B, 3),
    ),
    "in-place addition": lambda: (
        Then(
            lambda m, x: m.layer(x).add_(m.shift),
            layer=nn.Linear(3, 4),
            shift=vector(4),
        ),
        sequence(B, 3),
    ),
    "where": lambda: (
        Then(
            lambda m, x: torch.where(x > 0, x * m.up, m.down),
            up=vector(3),
            down=vector(3),
        ),
        sequence(B, 3),
    ),
    "matmul": lambda: (
        Then(lambda m, x: x @ m.w @ m.v.t(), w=vector(3, 4), v=vector(5, 4)),
        sequence(B, 2, 3),
    ),
    "matmul from the left": lambda: (
        Then(lambda m, x: m.w @ x, w=vector(4, 3)),
        sequence(B, 3, 2),
    ),
    "matmul of stacks": lambda: (
        Then(lambda m, x: (x @ m.w, m.v @ x), w=vector(2, 3, 4), v=vector(2, 5, 4)),
        sequence(B, 2, 4, 3),
    ),
    "relative attention": lambda: (
        Then(
            lambda m, x: torch.bmm(x.flatten(0, 1), m.keys.repeat(len(x), 1, 1)),
            keys=vector(2, 3, 5),
        ),
        sequence(B, 2, 4, 3),
    ),
    "learned bias of attention": lambda: (
        Then(
            lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.bias[None]),
            bias=vector(2, B, B),
        ),
        sequence(B, 2, B, 3),
    ),
    "matrix times vector": lambda: (
        Then(lambda m, x: x @ m.w, w=vector(3)),
        sequence(B, 2, 3),
    ),
    "addmm": lambda: (
        Then(lambda m, x: torch.addmm(m.b, x, m.w), w=vector(3, 4), b=vector(4)),
        sequence(B, 3),
    ),
    "einsum": lambda: (
        Then(lambda m, x: torch.einsum("bti,hio->bhto", x, m.w), w=vector(2, 3, 4)),
        sequence(B, B, 3),
    ),
    "part of a parameter": lambda: (
        Then(lambda m, x: F.linear(x, m.w[:3], m.w[3:, 0]), w=vector(6, 4)),
        sequence(B, 4),
    ),
    "split parameter": lambda: (
        Then(lambda m, x: [F.linear(x, w) for w in m.w.chunk(3)], w=vector(6, 4)),
        sequence(B, 5, 4),
    ),
    "expanded class token": lambda: (
        Tokens(lambda c, n: c.expand(n, -1, -1)),
        sequence(B, 3, 6),
    ),
    "repeated class token": lambda: (
        Tokens(lambda c, n: c.repeat(n, 1, 1)),
        sequence(B, 3, 6),
    ),
    "stacked": lambda: (
        Then(lambda m, x: torch.stack([x, m.p.expand(len(x), 3)], 1), p=vector(3)),
        sequence(B, 3),
    ),
    "assigned": lambda: (
        Then(filled, start=vector(4), layer=nn.Linear(4, 4)),
        sequence(B, 4),
    ),
    "merged lora": lambda: (Lora(merged=True), sequence(B, 3, 5)),
    "lora": lambda: (Lora(merged=False), sequence(B, 3, 5)),
    "weight norm": lambda: (
        parametrizations.weight_norm(nn.Linear(4, 3)),
        sequence(B, 4),
    ),
    "orthogonal": lambda: (
        parametrizations.orthogonal(nn.Linear(4, 4)),
        sequence(B, 4),
    ),
    "learned query": lambda: (
        Then(
            lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), 2, 3), x, x),
            q=vector(2, 3),
        ),
        sequence(B, 5, 3),
    ),
    "distances to learned centres": lambda: (
        Then(lambda m, x: torch.cdist(x, m.centres), centres=vector(5, 3)),
        sequence(B, 2, 3),
    ),
    "tied": lambda: (tied(), sequence(B, 4)),
    "tied embedding": lambda: (
        Then(
            lambda m, x: F.linear(m.table(x), m.table.weight), table=nn.Embedding(7, 3)
        ),
        words(),
    ),
    "unused": lambda: (
        Then(lambda m, x: m.used(x), used=nn.Linear(3, 2), unused=nn.Linear(3, 2)),
        sequence(B, 3),
    ),
    "frozen weight": lambda: (
        frozen(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "1.weight"),
        sequence(B, 3),
    ),
    "frozen convolution": lambda: (
        frozen(
            nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2)), "0.bias", "1.weight"
        ),
        images(),
    ),
    "subclass": lambda: (MyLinear(3, 2), sequence(B, 3)),
    "input used twice": lambda: (
        Then(
            lambda m, x: m.a(x) * m.b(x) + m.a(x.cos()),
            a=nn.Linear(3, 2),
            b=nn.Linear(3, 2),
        ),
        sequence(B, 3),
    ),
    "in-place activations": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(inplace=True),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(48, 3),
            nn.ELU(inplace=True),
        ),
        images(),
    ),
    "both halves in one batch": lambda: (
        Then(
            lambda m, x, y: m.head(m.layer(torch.cat([x, y])).chunk(2)[1]),
            layer=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
        ),
        [torch.randn(B, 3), torch.randn(B, 3)],
    ),
    "dictionary in and out": lambda: (
        Then(lambda m, x: {"y": m.layer(x), "z": (x,)}, layer=nn.Linear(3, 2)),
        sequence(B, 3),
    ),
}


def built(make):
    torch.manual_seed(0)
    model, inputs = make()
    return copy.deepcopy(model), model, inputs
