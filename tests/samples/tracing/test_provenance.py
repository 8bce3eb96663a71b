from dataclasses import dataclass

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

pytestmark = pytest.mark.usefixtures("float64")


def backward(model, x):
    sum_loss(model(x)).backward()


def test_hidden_state_carried_from_batch_to_batch():
    class Carry(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.h = nn.GRUCell(3, 4), None

        def forward(self, x):
            self.h = self.cell(x, self.h)
            return self.h

    model = Carry()
    x, y = torch.randn(2, 4, 3)
    source = PerSample(model, Layout(model))
    model(x)
    sum_loss(model(y)).backward()
    rows = source.take()
    source.detach()

    def both(pair):
        return model.cell(pair[:, 1], model.cell(pair[:, 0]))

    model.forward = both
    assert_close(rows, per_sample_loop(model, [torch.stack([x, y], 1)]))


def test_batches_that_stay_alive_are_looked_through_seldom(monkeypatch):
    looked, look = [], trace._alive

    def alive(known):
        found = look(known)
        looked.append((len(known), len(found)))
        return found

    monkeypatch.setattr(trace, "FEW_LEFT", 4)
    monkeypatch.setattr(trace, "_alive", alive)
    model, batches = nn.Linear(3, 2), list(torch.randn(200, 5, 3).unbind())
    source = PerSample(model, Layout(model))

    def train():
        for x in batches:
            backward(model, x)
            source.take()

    train()
    # Each time as many again have come, results that died since among them. After every
    # pass it would be half of the square of 200.
    assert 0 < sum(before for before, _ in looked) < 10 * len(batches)
    batches[:] = torch.randn(400, 5, 3).unbind()
    looked.clear()
    train()
    source.detach()
    assert looked[0][1] <= looked[0][0] - 150  # most of the old ones are forgotten


def test_a_model_that_calls_itself_is_watched_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, deep=True):
            return self(self.layer(x).tanh(), False) if deep else self.layer(x)

    model, x = Twice(), torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    backward(model, x)
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_bags_given_by_offsets_are_the_samples():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, 3), nn.Linear(3, 2)

        def forward(self, words, offsets):
            return self.head(self.bag(words, offsets))

    model, words = Text(), torch.randint(9, (11,))
    offsets = torch.tensor([0, 2, 2, 6])
    source = PerSample(model, Layout(model))
    sum_loss(model(words, offsets)).backward()
    rows, total = source.take(), Layout(model).gather()
    source.detach()
    assert_close(rows.sum(0), total)
    for i, bag in enumerate([words[:2], words[:0], words[2:6], words[6:]]):
        model.zero_grad()
        sum_loss(model(bag, torch.tensor([0]))).backward()
        assert_close(rows[i], Layout(model).gather())


def test_a_square_mask_is_not_taken_for_samples():
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    x, mask = torch.randn(4, 4, 6), torch.full((4, 4), -torch.inf).triu(1)
    source = PerSample(encoder, Layout(encoder))
    sum_loss(encoder(x, mask)).backward()
    rows = source.take()
    source.detach()
    for i in range(4):
        encoder.zero_grad()
        sum_loss(encoder(x[i : i + 1], mask)).backward()
        assert_close(rows[i], Layout(encoder).gather())


def test_weights_computed_before_the_pass_are_followed_to_their_parameters():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    with nn.utils.parametrize.cached():
        _ = model[0].weight
        sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_samples_of_another_pass_are_not_taken_for_weights():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.memory = nn.Linear(3, 3), None

        def forward(self, x):
            return self.layer(x if self.memory is None else x + self.layer(self.memory))

    model = Memory()
    source = PerSample(model, Layout(model))
    model.memory = model(torch.randn(4, 3)).mean(0)
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*microbatch"):
        model(torch.randn(4, 3))
    source.detach()


def test_results_written_into_views_of_a_buffer_stay_batched():
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            out = torch.empty(len(x), 2, 3)
            out[:, 0].copy_(self.layer(x))
            out[:, 1] = x
            return self.head(out)

    model, x = Filled(), torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    backward(model, x)
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_inputs_may_be_nested_in_mappings_and_dataclasses():
    @dataclass
    class Batch:
        index: int
        parts: dict

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch):
            return self.layer(batch.parts["x"][0])

    model, x = Reads(), torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    sum_loss(model(Batch(3, {"x": (x,)}))).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model.layer, [x]))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, u, v):
        zu, zv = (F.normalize(z, dim=1) for z in (self.left(u), self.right(v)))
        return zu @ zv.T * self.scale.exp()


def contrastive(logits):
    return F.cross_entropy(logits, torch.arange(len(logits)))


def test_the_parameter_that_meets_coupled_samples_is_named():
    model = Pair()
    source = PerSample(model, Layout(model), samples_in=("u", "v"))
    with pytest.raises(RuntimeError, match=r"'scale'"):
        model(torch.randn(4, 3), torch.randn(4, 3))
    source.detach()


def test_a_parameter_left_out_may_meet_coupled_samples():
    model, u, v = Pair(), torch.randn(4, 3), torch.randn(4, 3)
    tracked = [p for name, p in model.named_parameters() if name != "scale"]
    source = PerSample(model, Layout(model, only=tracked), samples_in=("u", "v"))
    contrastive(model(u, v)).backward()
    rows = source.take()
    source.detach()
    # A sample's row is its share of the batch loss: all others held fixed.
    for b in range(4):
        zu, zv = (F.normalize(z, dim=1) for z in (model.left(u), model.right(v)))
        own = torch.arange(4)[:, None] == b
        zu, zv = (torch.where(own, z, z.detach()) for z in (zu, zv))
        share = contrastive(zu @ zv.T * model.scale.exp())
        grads = torch.autograd.grad(share, tracked)
        assert_close(rows[b], torch.cat([g.flatten() for g in grads]))


def test_a_table_looked_up_at_indices_of_samples_holds_samples():
    def run(m, ids):
        found = m.table.index_select(0, ids.view(-1)).view(*ids.shape, -1)
        return m.layer(m.words(ids) + found)

    model = Then(run, words=nn.Embedding(9, 3), layer=nn.Linear(3, 2))
    model.register_buffer("table", torch.randn(9, 3))
    ids = torch.randint(9, (4, 5))
    source = PerSample(model, Layout(model))
    sum_loss(model(ids)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [ids]))
