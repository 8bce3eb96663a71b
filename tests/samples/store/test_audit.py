import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss
from torch import nn
from torch.testing import assert_close

import dome
from dome.parameters import Layout
from dome.samples import PerSample, per_sample_gradients
from dome.samples.store import audit

pytestmark = pytest.mark.usefixtures("float64")


class FusedHead(torch.autograd.Function):
    """Logits without a linear operation that anybody could see."""

    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h @ weight.T

    @staticmethod
    def backward(ctx, delta):
        h, weight = ctx.saved_tensors
        return delta @ weight, delta.flatten(0, -2).T @ h.flatten(0, -2)


class Tied(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), head

    def forward(self, words):
        return self.head(self, self.layer(self.table(words)).tanh())


def linear_head(m, h):
    return F.linear(h, m.table.weight)


def fused_head(m, h):
    return FusedHead.apply(h, m.table.weight)


def no_head(m, h):
    return h


def outside_head(m, h):
    return F.linear(h, m.table.weight)


# How the tied weight is used a second time: inside the model, and after it.
PARTIAL = {
    "fused": (fused_head, no_head),
    "outside the model": (no_head, outside_head),
}


def tied_step(inside, after, dtype=torch.float64):
    torch.manual_seed(0)
    model = Tied(inside).to(dtype)
    source = PerSample(model, Layout(model))
    words = torch.randint(7, (5, 3))

    def step():
        sum_loss(after(model, model(words))).backward()
        return source.take()

    return model, words, step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inside", "after"), PARTIAL.values(), ids=PARTIAL.keys())
def test_a_tied_weight_captured_in_one_of_two_uses_is_named(inside, after, dtype):
    _, _, step = tied_step(inside, after, dtype)
    with pytest.raises(RuntimeError, match=r"'table.weight'.*autograd.Function"):
        step()


def test_a_tied_weight_captured_in_both_uses_is_complete():
    model, words, step = tied_step(linear_head, no_head)
    rows = step()
    assert_close(rows, per_sample_loop(model, [words]))


def test_the_functional_form_is_complete_or_an_error_too():
    model = Tied(fused_head)
    words, targets = torch.randint(7, (5, 3)), torch.randint(7, (5, 3))

    def loss_fn(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    with pytest.raises(RuntimeError, match=r"'table.weight'.*\d\d% of it"):
        per_sample_gradients(model, loss_fn, words, targets)


def l2(p):
    return 0.3 * p.square().sum()


def l1(p):
    return 0.2 * p.abs().sum()


def norm(p):
    return 2 * p.norm()


PENALTIES = {
    "l2": lambda m: sum(map(l2, m.parameters())),
    "l1": lambda m: sum(map(l1, m.parameters())),
    "both": lambda m: sum(l1(p) + l2(p) for p in m.parameters()),
    "norms": lambda m: norm(m[0].weight) + norm(m[2].weight),
    "of matrices alone": lambda m: l2(m[0].weight) + l2(m[2].weight),
    "large": lambda m: 1e4 * sum(map(l2, m.parameters())),
    "small": lambda m: 1e-4 * sum(map(l2, m.parameters())),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
def test_a_penalty_on_the_weights_is_recognised(penalty, separate, dtype):
    # Two entries in the last bias: too few to tell by themselves.
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
    source, x = PerSample(model, Layout(model)), torch.randn(4, 3, dtype=dtype)
    if separate:
        sum_loss(model(x)).backward()
        penalty(model).backward()
    else:
        (sum_loss(model(x)) + penalty(model)).backward()
    rows = source.take()
    source.detach()
    # Rounding of sums of four numbers in float32.
    assert_close(rows, per_sample_loop(model, [x]), rtol=1e-5, atol=1e-6)


def test_a_penalty_also_covers_parameters_that_no_sample_uses():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = model["used"].forward
    source = PerSample(model, Layout(model))
    for _ in range(2):  # also on a step that is not looked into
        model.zero_grad()
        (model(torch.randn(4, 3)).sum() + PENALTIES["l2"](model)).backward()
        assert len(source.take()) == 4


def anchored(model):
    return sum((p - 1).square().sum() for p in model.parameters())


def test_another_penalty_is_announced_or_an_error(model):
    x = torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    (sum_loss(model(x)) + anchored(model)).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight'.*ignore_penalty=True"):
        source.take()
    source.detach()
    model.zero_grad()
    source = PerSample(model, Layout(model), ignore_penalty=True)
    (sum_loss(model(x)) + anchored(model)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_a_filter_takes_the_announcement(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, rank=2, ignore_penalty=True)
    (sum_loss(model(torch.randn(4, 3))) + anchored(model)).backward()
    optimizer.step()


def clipped(model, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clipped_by_value(model, loss):
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def accumulated(model, loss):
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()


def scaled(model, loss):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)


def hooked(model, loss):
    handles = [
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) for p in model.parameters()
    ]
    loss.backward()
    for handle in handles:
        handle.remove()


def noised(model, loss):
    loss.backward()
    for p in model.parameters():
        p.grad += torch.randn_like(p)


def frozen(model, loss):
    model[0].weight.requires_grad_(False)
    loss.backward()


def on_top(model, loss):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    loss.backward()


@pytest.mark.parametrize(
    "run",
    [clipped, clipped_by_value, accumulated, scaled, hooked, noised, frozen, on_top],
)
def test_what_others_do_to_the_gradient_makes_no_difference(run, model):
    # A user's own hooks are there before ours, and change what they get.
    model[2].weight.register_hook(lambda g: -3 * g)
    source, x = PerSample(model, Layout(model)), torch.randn(4, 3)
    run(model, sum_loss(model(x)))
    assert len(source.take()) == 4


class TwoTypes(nn.Module):
    """A router in float32 in a model of float64, as Switch Transformers has it."""

    def __init__(self):
        super().__init__()
        self.body, self.router = nn.Linear(3, 3), nn.Linear(3, 2).float()

    def forward(self, x):
        return self.router(self.body(x).float()).double()


@pytest.mark.parametrize("options", [{}, {"direction_rank": 1}], ids=["rows", "thin"])
def test_parameters_of_two_precisions_are_compared_each_in_its_own(options):
    model, x = TwoTypes(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dome.attach(model, optimizer, rank=2, **options):
        model(x).square().sum().backward()
        optimizer.step()
        (model(x).sum() + model.router.weight.pow(3).sum()).backward()
        optimizer.step()  # a step that is not looked into
    with dome.attach(model, optimizer, rank=2, **options):
        (model(x).sum() + model.router.weight.pow(3).sum()).backward()
        with pytest.raises(RuntimeError, match=r"'router.weight' miss a part"):
            optimizer.step()


def test_gradients_that_vanish_but_for_rounding_are_no_error():
    # The bias of attention's keys moves all scores of a query alike.
    torch.set_default_dtype(torch.float32)
    model = nn.MultiheadAttention(16, 2, batch_first=True, kdim=16, vdim=15)
    parameters = [model.in_proj_bias, *model.parameters()]
    source = PerSample(model, Layout(model, only=parameters))
    x = torch.randn(8, 12, 16)
    sum_loss(model(x, x, torch.randn(8, 12, 15))[0]).backward()
    assert len(source.take()) == 8


def test_a_use_that_starts_later_is_found_now_and_then(monkeypatch):
    monkeypatch.setattr(audit, "_EVERY", 3)
    heads = [no_head]

    def newest_head(m, h):
        return heads[-1](m, h)

    model, _, step = tied_step(no_head, newest_head)
    step()
    heads.append(outside_head)
    found = []
    for _ in range(5):
        model.zero_grad()
        try:
            step()
            found.append(False)
        except RuntimeError as error:
            found.append("'table.weight'" in str(error))
    assert found == [False, False, False, True, False]


def test_most_steps_hang_nothing_on_parameters(model, source):
    for step in range(3):
        model.zero_grad()
        loss = sum_loss(model(torch.randn(4, 3)))
        assert all(bool(p._backward_hooks) == (step == 0) for p in model.parameters())
        loss.backward()
        source.take()
    assert not any(p._backward_hooks for p in model.parameters())
    source.detach()


def test_detaching_takes_the_hooks_along(model):
    mine = model[0].weight.register_hook(lambda g: g)
    source = PerSample(model, Layout(model))
    model(torch.randn(4, 3))
    source.detach()
    assert list(model[0].weight._backward_hooks) == [mine.id]
    assert not model[2].weight._backward_hooks


def test_gradients_that_are_not_finite_are_left_to_others(model, source):
    (sum_loss(model(torch.randn(4, 3))) * float("inf")).backward()
    assert len(source.take()) == 4


def test_gradients_of_paused_forwards_are_excused_once(model, source):
    x = torch.randn(4, 3)
    with source.paused():
        aside = model(torch.randn(9, 3)).square().sum()
    (sum_loss(model(x)) + aside).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


@pytest.mark.parametrize("scale", [1e-28, 1e15])
def test_what_is_missing_is_found_at_any_scale(scale):
    torch.manual_seed(0)
    model, words = Tied(fused_head).float(), torch.randint(7, (5, 3))
    source = PerSample(model, Layout(model))
    (sum_loss(model(words)) * scale).backward()
    with pytest.raises(RuntimeError, match=r"'table.weight' miss a part"):
        source.take()


@pytest.mark.parametrize("scale", [1e-32, 1e-28, 1e15])
def test_what_is_complete_is_no_error_at_any_scale(scale):
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).float()
    source = PerSample(model, Layout(model))
    (sum_loss(model(torch.randn(8, 10, dtype=torch.float32))) * scale).backward()
    assert len(source.take()) == 8


@pytest.fixture
def medium():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def wide_step(head):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 128), nn.Tanh()).float()
    model = nn.Sequential(body, nn.Linear(128, 64)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 64, dtype=torch.float32)
    with dome.attach(model, optimizer, rank=2):
        for _ in range(3):
            optimizer.zero_grad()
            (head(model, model(x)) ** 2).mean().backward()
            optimizer.step()


@pytest.mark.usefixtures("medium")
def test_products_of_eight_bits_are_complete():
    wide_step(lambda model, y: y)


@pytest.mark.usefixtures("medium")
def test_what_is_missing_is_found_in_products_of_eight_bits():
    with pytest.raises(RuntimeError, match=r"'1.weight' miss a part.*watch"):
        wide_step(lambda model, y: F.linear(y, model[1].weight.T))
