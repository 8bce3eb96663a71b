import operator

import pytest
import torch
from samples.loop import per_sample_loop, sum_loss
from samples.models import B, Then, vector
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.tracing import trace

pytestmark = pytest.mark.usefixtures("float64")

# What Python makes of one entry: a sample's kind, length or time.
VIEWS = {
    "==": lambda v: v == 2,
    "!=": lambda v: v != 2,
    "<": lambda v: v < 2,
    ">=": lambda v: v >= 2,
    "reversed ==": lambda v: v == 2,
    "bool": bool,
    "int": int,
    "float": float,
    "item": lambda v: v.item(),
    "index": operator.index,
    "range": lambda v: len(range(v)),
    "max": lambda v: int(max(v, 1)),
    "min": lambda v: int(min(v, 1)),
    "in a list": lambda v: v in [1, 2],
    "in a tensor": lambda v: v in torch.tensor([1, 2]),
    "not": operator.not_,
    "another entry": lambda v: bool(v == torch.tensor(2)),
    "a pattern": lambda v: "two" if v == 2 else "other",
    "slice": lambda v: len([0, 1, 2, 3][:v]),
    "+": lambda v: int(v + 1),
    "-": lambda v: int(5 - v),
    "*": lambda v: int(3 * v),
    "/": lambda v: float(v / 2),
    "//": lambda v: int(v // 2),
    "%": lambda v: int(v % 2),
    "**": lambda v: int(v**2),
    "negative": lambda v: int(-v),
    "sum": lambda v: int(sum([v, v])),
    "+=": lambda v: int(operator.iadd(v.clone(), 1)),
    "format": lambda v: f"{v:d}",
    "tolist": lambda v: v.tolist(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("entry", ["one of a vector", "one of a matrix", "one alone"])
def test_python_sees_of_an_entry_what_it_sees_without_a_filter(view, entry):
    seen = []
    pick = {
        "one of a vector": lambda k, i: k[i],
        "one of a matrix": lambda k, i: k.view(-1, 1)[i, 0],
        "one alone": lambda k, i: k[i : i + 1].squeeze(),
    }[entry]

    def forward(m, x, kind):
        seen.append([view(pick(kind, i)) for i in range(len(kind))])
        return m.layer(x)

    model = Then(forward, layer=nn.Linear(3, 2))
    inputs = torch.randn(B, 3), torch.tensor([0, 1, 2, 3])
    model(*inputs)
    source = PerSample(model, Layout(model))
    sum_loss(model(*inputs)).backward()
    source.detach()
    assert seen[1] == seen[0]


def routed(m, x, kind):
    rows = [m.a(x[i]) if kind[i] == 2 else m.b(x[i]) for i in range(len(x))]
    return torch.stack(rows)


def scaled(m, x, kind):
    return torch.stack([m.a(x[i]) * (kind[i] + 1) for i in range(len(x))])


def lengths(m, x, kind):
    return torch.stack([m.a(x[i, : kind[i] // 2 + 1]).sum(0) for i in range(len(x))])


def own_scale(m, x, kind):
    return torch.stack([m.w * x[i, 0] / (kind[i] + 1) for i in range(len(x))])


def own_entry(m, x, kind):
    return torch.stack([m.w[0] * x[i, 0] + m.w[1] for i in range(len(x))])


LOOPS = {
    "routed by kind": (routed, (B, 3)),
    "scaled by an entry": (scaled, (B, 3)),
    "as long as an entry says": (lengths, (B, 3, 3)),
    "a weight times an entry": (own_scale, (B, 3)),
    "an entry of a weight times an entry": (own_entry, (B, 3)),
}


@pytest.mark.parametrize(("forward", "shape"), LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_over_samples_takes_the_branches_of_plain_torch(forward, shape):
    torch.manual_seed(0)
    model = Then(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 2), w=vector(3))
    inputs = torch.randn(shape), torch.tensor([0, 1, 2, 3])
    plain = model(*inputs)
    source = PerSample(model, Layout(model))
    output = model(*inputs)
    sum_loss(output).backward()
    rows = source.take()
    source.detach()
    assert torch.equal(output, plain)
    assert_close(rows, per_sample_loop(model, inputs))


def test_a_failure_to_follow_is_never_an_answer_to_a_comparison(monkeypatch):
    def fails(*_):
        raise TypeError("view() takes at least one argument")

    model = Then(lambda m, x: m.layer(x) if x[0, 0] == 1 else x, layer=nn.Linear(3, 2))
    source = PerSample(model, Layout(model))
    monkeypatch.setattr(trace, "follow", fails)
    with pytest.raises(RuntimeError, match=r"cannot follow .*microbatch"):
        model(torch.ones(B, 3))
    source.detach()
