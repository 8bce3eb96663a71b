import torch
import torch.nn.functional as F
from samples.models import B, Then, images, sequence, vector, words
from torch import nn
from torch.nn.utils import parametrizations


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


def filled(m, x):
    out = torch.zeros(len(x), 3, 4)
    out[:, 0] = m.start
    out[:, 1:] = m.layer(x)[:, None]
    return m.layer(out)


def complex_layers(m, x):
    z = torch.complex(x, x.flip(1))
    h = F.linear(z, torch.complex(m.a, m.b)) @ torch.complex(m.b, m.a)
    return F.conv1d(h[:, None], torch.complex(m.c, m.c)).abs()


PARAMETERS = {
    "complex layers of real parameters": lambda: (
        Then(complex_layers, a=vector(3, 3), b=vector(3, 3), c=vector(2, 1, 2)),
        sequence(B, 3),
    ),
    "samples as the weight of a linear map": lambda: (
        Then(lambda m, x: F.linear(m.w, x, x[:, 0]).T.tanh(), w=vector(2, 3)),
        sequence(B, 3),
    ),
    "an entry of a sample and a vector": lambda: (
        Then(
            lambda m, x: m.head(torch.stack([r[0] * m.w[0] + m.w for r in x])),
            w=vector(3),
            head=nn.Linear(3, 2),
        ),
        sequence(B, 3),
    ),
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
            lambda m, x: F.scaled_dot_product_attention(
                x, x, x, attn_mask=m.bias[None]
            ),
            bias=vector(2, B, B),
        ),
        sequence(B, 2, B, 3),
    ),
    "one constant matrix for each sample": lambda: (
        Then(
            lambda m, x: m.layer(x @ torch.eye(3).to(x).expand(len(x), 3, 3).cos()),
            layer=nn.Linear(3, 2),
        ),
        sequence(B, 5, 3),
    ),
    "one constant matrix for each sample from the left": lambda: (
        Then(
            lambda m, x: m.layer(x.new_zeros(len(x), 2, 5, 5).cos() @ x[:, None]),
            layer=nn.Linear(3, 2),
        ),
        sequence(B, 5, 3),
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
    "spectral norm": lambda: (
        parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
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
    "in-place operations on sequences": lambda: (
        Then(
            lambda m, x: m.head(m.layer(x).mul_(0.5).relu_()).add_(m.shift),
            layer=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
            shift=vector(2),
        ),
        sequence(B, 5, 3),
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
