import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from samples.models import Then
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import dome
from dome.parameters import Layout
from dome.samples import PerSample, per_sample_gradients
from dome.samples.capture import capture_paused

pytestmark = pytest.mark.usefixtures("float64")

again = functools.partial(checkpoint, use_reentrant=False)
B = 4


class Block(nn.Module):
    """A region with a norm, attention, dropout and a weight that is derived."""

    def __init__(self, through):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.wide = parametrizations.weight_norm(nn.Linear(6, 8))
        self.drop = nn.Dropout(0.4)
        self.narrow = nn.Linear(8, 6)
        self.through = through

    def region(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.narrow(self.drop(F.gelu(self.wide(x))))

    def forward(self, x):
        return self.through(self.region, x)


def plainly(function, *args):
    return function(*args)


def nested(function, x):
    return again(lambda x: again(function, x) * 1.0, x)


def selectively(function, x):
    def policy(_, operation, *args, **kwargs):
        kept = "mm" in str(operation)
        kinds = CheckpointPolicy
        return kinds.MUST_SAVE if kept else kinds.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return again(function, x, context_fn=contexts)


def to_the_end(function, x):
    with set_checkpoint_early_stop(False):
        return again(function, x)


def network(through=plainly, around=plainly):
    torch.manual_seed(0)

    def run(m, tokens):
        x = m.table(tokens)
        x = around(lambda x: m.second(m.first(x)), x)
        # The head is tied to the embedding: used inside and outside of checkpoints.
        return m.head(x).mean(1) + F.linear(x.mean(1), m.table.weight)

    return Then(
        run,
        table=nn.Embedding(7, 6),
        first=Block(through),
        second=Block(through),
        head=nn.Linear(6, 7),
    )


def tokens():
    return torch.randint(7, (B, 5), generator=torch.Generator().manual_seed(1))


def rows_of(model, call=None, backwards=1, **options):
    """Rows and gradient of one step; dropout draws alike for every model."""
    source = PerSample(model, Layout(model), **options)
    torch.manual_seed(2)
    loss = (call or model)(tokens()).square().sum()
    for last in range(backwards)[::-1]:
        loss.backward(retain_graph=last > 0)
    rows = source.take()
    source.detach()
    return rows, torch.cat([p.grad.flatten() for p in model.parameters()])


FORMS = {
    "each block": ({"through": again}, None),
    "nested": ({"through": nested, "around": again}, None),
    "selective": ({"through": selectively}, None),
    "without early stop": ({"through": to_the_end, "around": to_the_end}, None),
    "around the model": ({}, again),
    "around and inside": ({"through": again}, again),
}


@pytest.mark.parametrize(("options", "around"), FORMS.values(), ids=FORMS.keys())
def test_rows_are_those_without_checkpointing(options, around):
    expected = rows_of(network())
    model = network(**options)
    call = functools.partial(around, model) if around else model
    found = rows_of(model, call)
    # The same kernels on the same numbers.
    assert_close(found, expected, rtol=0, atol=0)
    assert_close(found[0].sum(0), found[1])


def test_several_forward_passes_and_two_backward_passes_are_as_without():
    def twice(model):
        return lambda x: model(x) + model(x.flip(1)) * 0.5

    plain, model = network(), network(again)
    expected = rows_of(plain, twice(plain), backwards=2)
    assert_close(rows_of(model, twice(model), backwards=2), expected, rtol=0, atol=0)


def test_nothing_inside_a_checkpoint_is_kept_and_it_is_computed_again_once():
    seen = []

    def region(model, x):
        h = model.wide(x)
        seen.append(weakref.ref(h))
        return model.narrow(h.tanh())

    def run(m, x):
        return again(region, m, x)

    wide = parametrizations.weight_norm(nn.Linear(3, 6))
    model = Then(run, wide=wide, narrow=nn.Linear(6, 2))
    source = PerSample(model, Layout(model))
    loss = model(torch.randn(B, 3)).sum()
    assert seen[0]() is None
    loss.backward()
    assert len(seen) == 2
    assert_close(source.take().sum(0), Layout(model).gather())


def test_samples_by_number_are_found_again_inside_a_checkpoint():
    def run(m, x, through):
        kept = x[:, :, 0] > 0
        expert = through(lambda rows: m.expert(rows).tanh(), m.layer(x)[kept])
        out = m.layer(x)
        out[kept] = expert
        return m.head(out).sum(1)

    def built(through):
        torch.manual_seed(0)
        parts = {"layer": nn.Linear(3, 3), "expert": nn.Linear(3, 3)}
        return Then(
            lambda m, x: run(m, x, through), **parts, head=nn.Linear(3, 2)
        ), torch.randn(B, 5, 3)

    rows = []
    for through in (plainly, again):
        model, x = built(through)
        source = PerSample(model, Layout(model))
        model(x).square().sum().backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


def test_what_reaches_a_region_by_keywords_containers_and_closures_is_found_again():
    def region(m, x, pair, *, time_first, hidden):
        left, right = pair
        out = m.layer(x) * left + m.layer(right) + m.scale * hidden
        return out + m.layer(time_first).transpose(0, 1)

    def run(m, x, through):
        hidden = m.layer(x).tanh()
        flipped = x.flip(2)
        pair, turned = [hidden, flipped], flipped.transpose(0, 1)
        return through(
            functools.partial(region, m), x, pair, time_first=turned, hidden=hidden
        )

    rows = []
    for through in (lambda f, *a, **k: f(*a, **k), again):
        torch.manual_seed(0)
        model = Then(
            lambda m, x, through=through: run(m, x, through),
            layer=nn.Linear(3, 3),
            scale=nn.Parameter(torch.randn(3)),
        )
        source = PerSample(model, Layout(model))
        # As many positions as samples: shapes alone do not tell them apart.
        model(torch.randn(B, B, 3)).square().sum().backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


def test_a_step_inside_watch_sees_the_region_once():
    rows = []
    for through in (plainly, again):
        model = network(through)
        source = PerSample(model, Layout(model))
        torch.manual_seed(2)
        x = tokens()
        with source.watch((x,)):
            model.forward(x).square().sum().backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


@pytest.mark.parametrize("around", [plainly, again])
def test_what_was_not_captured_is_not_captured_when_it_is_computed_again(around):
    rows = []
    for pause in (False, True):
        model = network(again)
        source = PerSample(model, Layout(model))
        torch.manual_seed(2)
        loss = model(tokens()).square().sum()
        if pause:
            with source.paused():
                loss = loss + around(model, tokens()).square().sum()
        loss.backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


def test_what_was_captured_is_captured_again_although_the_capture_rests_by_now():
    rows = []
    for around in (plainly, again):
        model = network()
        source = PerSample(model, Layout(model))
        torch.manual_seed(2)
        loss = around(model, tokens()).square().sum()
        with capture_paused(model):
            loss.backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"update_every": 2}, {"direction_rank": 2}])
def test_steps_are_as_without(options):
    weights = []
    for through in (plainly, again):
        model = network(through)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dome.attach(model, optimizer, rank=2, **options)
        torch.manual_seed(2)
        for _ in range(4):
            optimizer.zero_grad()
            model(tokens()).square().mean().backward()
            optimizer.step()
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert_close(weights[1], weights[0], rtol=0, atol=0)


@pytest.mark.parametrize("samples", ["per_sample", "microbatch"])
def test_two_filters_and_kinds_of_samples_are_as_without(samples):
    weights = []
    for through in (plainly, again):
        model = network(through)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (matrices, rest)]
        for optimizer in optimizers:
            dome.attach(model, optimizer, rank=2, samples=samples)
        torch.manual_seed(2)
        for _ in range(2):
            for half in tokens().split(2):
                model(half).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_autocast_is_as_without():
    rows = []
    for through in (plainly, again):
        model = network(through).float()
        source = PerSample(model, Layout(model))
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens()).float().square().sum()
        loss.backward()
        rows.append(source.take())
    assert_close(rows[1], rows[0], rtol=0, atol=0)


@pytest.mark.parametrize("inside", [True, False])
def test_hooks_of_the_user_s_around_or_inside_a_region_change_nothing(inside):
    def offloaded(function, x):
        if not inside:
            with torch.autograd.graph.save_on_cpu():
                return again(function, x)

        def first(x):
            with torch.autograd.graph.save_on_cpu():
                return function(x)

        return again(lambda x: function(first(x)), x)

    def plain(function, x):
        return function(function(x)) if inside else function(x)

    expected = rows_of(network(plain))
    assert_close(rows_of(network(offloaded)), expected, rtol=0, atol=0)


def test_functional_rows_and_sequential_checkpoints():
    def run(m, x):
        return checkpoint_sequential(m.layers, 2, x, use_reentrant=False)

    def loss(out, target):
        return (out - target).square().mean()

    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model, x = Then(run, layers=layers), torch.randn(B, 3)
    target = torch.randn(B, 4)
    expected = per_sample_gradients(layers, loss, x, target)
    assert_close(per_sample_gradients(model, loss, x, target), expected)
    assert dome.verify(model, loss, x, target).ok


def test_other_ways_into_a_checkpoint_are_refused_by_name():
    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def run(m, x):
        region = generator(m.layer, True, x=x)
        next(region)
        out = m.layer(x)
        next(region, None)
        return out

    model = Then(run, layer=nn.Linear(3, 2))
    PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"'layer.weight'.*not entered by"):
        model(torch.randn(B, 3))
