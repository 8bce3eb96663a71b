import pytest
import torch
from samples.loop import per_sample_loop, sum_loss
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from dome.parameters import Layout
from dome.samples import MicroBatch, PerSample, source_for

pytestmark = pytest.mark.usefixtures("float64")

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Counts how often the host waits for the value of a tensor."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.num = 0
        plain = torch.Tensor.tolist

        def tolist(t):
            self.num += 1
            return plain(t)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func in READS
        return func(*args, **(kwargs or {}))

    def since(self):
        num, self.num = self.num, 0
        return num


def zeroed(model):
    model.zero_grad(set_to_none=False)


def dropped(model):
    model.zero_grad()


def clipped(model):
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)


@pytest.mark.parametrize("between", [zeroed, dropped, clipped, lambda _: None])
@pytest.mark.parametrize("kind", ["per_sample", "microbatch"])
def test_only_take_waits_for_the_device_and_once(kind, between, monkeypatch):
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)])
    model.forward = lambda x: model[1](model[0](x).relu())  # the third is not used
    model[2].weight.grad = torch.zeros(2, 2)
    source, x = source_for(kind, model, Layout(model)), torch.randn(4, 3)
    with Reads(monkeypatch) as reads:
        for _ in range(3):
            sum_loss(model(x)).backward()
            between(model)
            sum_loss(model(x)).backward()
            assert reads.since() == 0
            source.take()
            assert reads.since() <= 1
            source.arm(True)
            assert reads.since() == 0
            model.zero_grad()


def test_a_plain_step_waits_for_nothing(model, source, monkeypatch):
    x = torch.randn(4, 3)
    with Reads(monkeypatch) as reads:
        for step in range(3):
            model.zero_grad()
            sum_loss(model(x)).backward()
            source.take()
            source.arm(True)
            assert reads.since() == (step == 0)


@pytest.mark.parametrize("between", [zeroed, dropped])
@pytest.mark.parametrize("again", [False, True])
def test_rows_of_gradients_that_were_zeroed_are_void(between, again, model, source):
    x, y = torch.randn(4, 3), torch.randn(3, 3)
    sum_loss(model(x)).backward()
    if again:
        sum_loss(model(x)).backward()
    between(model)
    sum_loss(model(y)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [y]))


def test_rows_of_gradients_that_were_changed_and_not_zeroed_stay(model, source):
    x, y = torch.randn(4, 3), torch.randn(3, 3)
    sum_loss(model(x)).backward()
    clipped(model)
    sum_loss(model(y)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, torch.cat([per_sample_loop(model, [part]) for part in (x, y)]))


@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_micro_batches_of_gradients_that_were_zeroed_in_place_are_void(when, model):
    source, x = MicroBatch(model, Layout(model)), torch.randn(4, 3)
    sum_loss(model(x)).backward()
    if when == "before forward":
        zeroed(model)
        loss = sum_loss(model(x))
    else:
        loss = sum_loss(model(x))
        zeroed(model)
    loss.backward()
    assert_close(source.take(), Layout(model).gather()[None])


def test_a_penalty_that_arrives_first_belongs_to_the_micro_batch(model):
    source, x = MicroBatch(model, Layout(model)), torch.randn(4, 3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    loss = sum_loss(model(x))
    penalty = sum(p.square().sum() for p in model.parameters())
    (loss + penalty).backward()
    assert_close(source.take(), Layout(model).gather()[None])


def test_a_filter_per_parameter_is_told_of_a_part_that_is_missing(model):
    x = torch.randn(4, 3)
    source = PerSample(model, Layout(model, only=[model[0].weight]))
    loss = sum_loss(model(x)) + sum_loss(nn.functional.linear(x, model[0].weight))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' miss a part"):
        source.take()
