import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.rules import RULES

pytestmark = pytest.mark.usefixtures("float64")


def by_rows(h, ids, seen):
    return h.masked_scatter((ids == 0)[..., None], seen)


def by_expanded_rows(h, ids, seen):
    return torch.masked_scatter(h, (ids == 0)[..., None].expand(h.shape), source=seen)


def by_entries(h, ids, seen):
    mask = (ids == 0)[..., None] & (torch.arange(4) < 3)
    return h.masked_scatter(mask, seen)


def time_first(h, ids, seen):
    mixed = h.transpose(0, 1).masked_scatter((ids == 0).T[..., None], seen)
    return mixed.transpose(0, 1)


def of_rows_by_number(h, ids, seen):
    order = torch.arange(len(h)).flip(0)
    return by_rows(h[order], ids[order], seen)[order]


def in_place(h, ids, seen):
    return h.clone().masked_scatter_((ids == 0)[..., None], seen)


class Illustrated(nn.Module):
    """Sentences in which the word 0 stands for a picture, of which all have some."""

    def __init__(self, put):
        super().__init__()
        self.words, self.eye = nn.Embedding(9, 4), nn.Linear(3, 4)
        self.head, self.put = nn.Linear(4, 2), put

    def forward(self, ids, pictures):
        seen = self.eye(pictures).tanh()
        return self.head(self.put(self.words(ids), ids, seen).cumsum(1).tanh())


def sentences(counts):
    ids = torch.arange(6).repeat(len(counts), 1) + 1
    for b, count in enumerate(counts):
        ids[b, 1 : count + 1] = 0
    return ids, torch.randn(max(sum(counts), 1) + 1, 3)  # one more than is asked for


def shares(model, ids, pictures):
    out, layout = model(ids, pictures), Layout(model)
    (delta,) = torch.autograd.grad(out.square().sum(), out, retain_graph=True)
    for b in range(len(ids)):
        own = torch.zeros_like(delta)
        own[b] = delta[b]
        grads = torch.autograd.grad(out, layout.parameters, own, retain_graph=True)
        yield torch.cat([g.flatten() for g in grads])


def compared(model, source, counts):
    ids, pictures = sentences(counts)
    model.zero_grad()
    model(ids, pictures).square().sum().backward()
    rows, gradient = source.take().clone(), Layout(model).gather().clone()
    with source.paused():
        literal = torch.stack(list(shares(model, ids, pictures)))
    assert_close(rows, literal)
    assert_close(gradient, literal.sum(0))


PUTS = (by_rows, by_expanded_rows, by_entries, time_first, of_rows_by_number, in_place)


@pytest.mark.parametrize("put", PUTS)
def test_each_sample_has_the_gradient_of_the_entries_that_are_put_into_it(put):
    torch.manual_seed(0)
    model = Illustrated(put)
    source = PerSample(model, Layout(model), samples_in=("ids",))
    # Of the same shapes: which sample an entry goes to differs from batch to batch.
    for counts in ((3, 0), (2, 1), (1, 2), (4, 0, 1), (0, 0), (1,)):
        compared(model, source, counts)
    source.detach()


def test_what_a_mask_names_is_compared_in_every_batch_without_a_rule(monkeypatch):
    monkeypatch.delitem(RULES, torch.Tensor.masked_scatter)
    torch.manual_seed(0)
    model = Illustrated(by_rows)  # now by sample, each from the first picture on
    source = PerSample(model, Layout(model), samples_in=("ids",))
    compared(model, source, (3, 0))
    with pytest.raises(RuntimeError, match=r"'masked_scatter'.* has other values"):
        model(*sentences((2, 1)))
    source.detach()
