import torch
import torch.nn.functional as F
from samples.models import B, Then, sequence, vector, words
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LAST = torch.tensor([2, 0, 4, 1])
LENGTHS = torch.tensor([2, 5, 1, 4])


def last_of(lengths):
    return Then(
        lambda m, x, last: m.head(m.layer(x)[torch.arange(len(x)), last].tanh()),
        layer=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    )


def averaged(m, x, keep):
    # Only the words that are kept go through the layers, packed into one matrix.
    h = m.norm(m.layer(x[keep])).tanh()
    owner = torch.arange(len(x))[:, None].expand(keep.shape)[keep]
    total = torch.zeros(len(x), 4).index_add(0, owner, h)
    return m.head(total / keep.sum(1, keepdim=True))


def chosen(m, x, keep):
    h = m.layer(x)
    words = m.head(h.masked_select(keep[..., None]).view(-1, 4).tanh())
    return torch.zeros_like(h).masked_scatter(keep[..., None], words)


class Experts(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.router = run, nn.Linear(4, 3)
        self.experts, self.shift = vector(3, 4, 4), vector(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = self.run(self, flat, weights, chosen).view_as(x)
        return self.head(x + out)


def one_by_one(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for expert in range(3):
        rows, rank = torch.where(chosen == expert)
        h = F.linear(x[rows], m.experts[expert], m.shift[expert])
        out.index_add_(0, rows, h * weights[rows, rank, None])
    return out


def into_zeros(m, x, weights, chosen):
    out = torch.zeros(x.shape)
    for expert in range(3):
        rows, rank = torch.where(chosen == expert)
        h = F.linear(x[rows], m.experts[expert], m.shift[expert])
        out = out.index_add(0, rows, h * weights[rows, rank, None])
    return out


def in_groups(m, x, weights, chosen):
    owner, order = torch.sort(chosen.flatten())
    ends = torch.histc(owner.float(), 3, 0, 2).cumsum(0).int()
    h = F.grouped_mm(x[order // 2], m.experts, offs=ends) + m.shift[owner]
    h = h * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return h[back].view(len(x), 2, -1).sum(1)


# Torch has this product in float32 at most, and not before 2.10.
GROUPED = {"experts in groups": lambda: (Experts(in_groups), sequence(B, 5, 4))}
if not hasattr(F, "grouped_mm"):
    GROUPED = {}


def in_products(m, x, weights, chosen):
    rows = x.repeat_interleave(2, 0)
    h = torch.bmm(rows[:, None], m.experts[chosen.flatten()])[:, 0]
    h = h + m.shift.index_select(0, chosen.flatten())
    return (h * weights.reshape(-1, 1)).view(len(x), 2, -1).sum(1)


def packed(kind, *, ordered=False, **settings):
    def run(m, x, lengths):
        if ordered:
            lengths = lengths.sort(descending=True).values
        packed = pack_padded_sequence(
            m.first(x), lengths, batch_first=True, enforce_sorted=ordered
        )
        out, last = m.layer(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=5)
        return m.head(out).cumsum(1), last

    width = (settings.get("proj_size") or 4) * (1 + settings.get("bidirectional", 0))
    return Then(
        run,
        first=nn.Linear(3, 3),
        layer=kind(3, 4, batch_first=True, **settings),
        head=nn.Linear(width, 2),
    )


def packed_input(*, ordered=False):
    lengths = LENGTHS.sort(descending=True).values if ordered else LENGTHS
    return [torch.randn(B, 5, 3), lengths]


def one_by_one_joined(m, x):
    return m.head(torch.cat([m.layer(x[b : b + 1]) for b in range(len(x))]))


def masked_by_a_weight(m, x, mask):
    h = m.layer(x)
    h[mask] = m.start
    return m.head(h)


def images_in_a_text(m, words, images):
    h, places = m.table(words), (words == 0)[..., None]
    return m.head(h.masked_scatter(places.expand_as(h), m.layer(images)))


def text_with_images():
    text = torch.randint(1, 7, (B, 6))
    text[:, 1:3] = 0
    return [text, torch.randn(B, 2, 3)]


INDEXING = {
    "last word by index": lambda: (last_of(LAST), [torch.randn(B, 5, 3), LAST]),
    "last word gathered": lambda: (
        Then(
            lambda m, x, last: m.head(
                m.layer(x).gather(1, last[:, None, None].expand(-1, 1, 4))[:, 0]
            ),
            layer=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
        ),
        [torch.randn(B, 5, 3), LAST],
    ),
    "words behind a mask": lambda: (
        Then(
            averaged, layer=nn.Linear(3, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)
        ),
        [torch.randn(B, 5, 3), torch.arange(5) < LENGTHS[:, None]],
    ),
    "words selected by a mask": lambda: (
        Then(chosen, layer=nn.Linear(3, 4), head=nn.Linear(4, 4)),
        [torch.randn(B, 5, 3), torch.arange(5) < LENGTHS[:, None]],
    ),
    "words of a table behind a mask": lambda: (
        Then(
            lambda m, x: m.table(x[x > 2]) * m.scale + m.shift[x[x > 2]],
            table=nn.Embedding(7, 3),
            scale=vector(3),
            shift=vector(7, 1),
        ),
        words(),
    ),
    "images behind a mask": lambda: (
        Then(
            lambda m, x, keep: m.norm(m.conv(x.flatten(0, 1)[keep.flatten()])),
            conv=nn.Conv2d(2, 4, 3),
            norm=nn.GroupNorm(2, 4),
        ),
        [torch.randn(B, 3, 2, 4, 4), torch.arange(3) < (LENGTHS[:, None] - 1)],
    ),
    "bilinear behind a mask": lambda: (
        Then(
            lambda m, x, keep: m.layer(x[keep], x[keep].sin()),
            layer=nn.Bilinear(3, 3, 2),
        ),
        [torch.randn(B, 5, 3), torch.arange(5) < LENGTHS[:, None]],
    ),
    "there and back": lambda: (
        Then(
            lambda m, x: m.head(m.layer(x.flip(0)).flip(0)),
            layer=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
        ),
        sequence(B, 3),
    ),
    "experts one by one": lambda: (Experts(one_by_one), sequence(B, 5, 4)),
    "experts into zeros": lambda: (Experts(into_zeros), sequence(B, 5, 4)),
    "experts in products": lambda: (Experts(in_products), sequence(B, 5, 4)),
    "packed gru": lambda: (packed(nn.GRU, num_layers=2), packed_input()),
    "packed lstm both ways": lambda: (
        packed(nn.LSTM, bidirectional=True, num_layers=2),
        packed_input(),
    ),
    "packed lstm with projection": lambda: (
        packed(nn.LSTM, proj_size=2),
        packed_input(),
    ),
    "packed rnn in order": lambda: (
        packed(nn.RNN, ordered=True),
        packed_input(ordered=True),
    ),
    "one by one and joined": lambda: (
        Then(one_by_one_joined, layer=nn.Linear(3, 4), head=nn.Linear(4, 2)),
        sequence(B, 5, 3),
    ),
    "pieces one by one and joined": lambda: (
        Then(
            lambda m, x: m.head(torch.cat([m.layer(t).flatten(1) for t in x.split(1)])),
            layer=nn.Conv2d(2, 4, 3),
            head=nn.Linear(16, 2),
        ),
        [torch.randn(B, 2, 4, 4)],
    ),
    "parts of one sample side by side": lambda: (
        Then(
            lambda m, x: torch.cat(
                [m.layer(torch.cat([t, t.sin()], -1)) for t in x.split(1)]
            ),
            layer=nn.Linear(6, 2),
        ),
        sequence(B, 3),
    ),
    "a weight where a mask says": lambda: (
        Then(
            masked_by_a_weight,
            layer=nn.Linear(3, 4),
            start=vector(4),
            head=nn.Linear(4, 2),
        ),
        [torch.randn(B, 5, 3), torch.arange(5) < LENGTHS[:, None]],
    ),
    "images where a text has their places": lambda: (
        Then(
            images_in_a_text,
            table=nn.Embedding(7, 4),
            layer=nn.Linear(3, 4),
            head=nn.Linear(4, 2),
        ),
        text_with_images(),
    ),
}
