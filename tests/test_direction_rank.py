"""The filter with directions of low rank, against the same tracker fed with rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dome
from dome.parameters import Layout
from dome.samples.store import factors
from dome.trackers.blocks import ranks_of
from dome.trackers.low_rank import LowRankPower

K, R = 3, 2


class EveryKind(nn.Module):
    """Words, a tied head, convolutions there and back, groups, attention, norms."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 12, padding_idx=0)
        self.linear = nn.Linear(12, 20)
        self.conv = nn.Conv1d(20, 16, 3, stride=2, padding=2, dilation=2)
        self.grouped = nn.Conv1d(16, 16, 3, groups=4, padding=1)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.back = nn.ConvTranspose1d(16, 12, 3, stride=2, output_padding=1)

    def forward(self, x):
        h = torch.tanh(self.linear(self.words(x)))
        h = self.grouped(self.conv(h.mT)).mT
        h = self.norm(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = torch.tanh(self.back(h.mT)).mean(2)
        return F.linear(h, self.words.weight)


def batch(rng, num=8):
    return torch.randint(30, (num, 7), generator=rng), torch.randint(
        30, (num,), generator=rng
    )


class Twin:
    """Per-sample rows, one tracker a block that is given them, a plain step."""

    def __init__(self, model, layout="global"):
        self.model, self.layout = model, Layout(model, layout)
        self.trackers = {
            block: LowRankPower(self.layout.shapes(block), rank, R, dtype=torch.float64)
            for block, rank in zip(
                self.layout.blocks,
                ranks_of(self.layout.blocks, K).values(),
                strict=True,
            )
        }

    def step(self, *batches):
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        G = dome.per_sample_gradients(self.model, F.cross_entropy, x, y)
        g = G.mean(0)
        for block, tracker in self.trackers.items():
            columns = slice(block.start, block.stop)
            tracker.update(G[:, columns])
            g[columns] = tracker.project_out(g[columns])
        start = 0
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(0.1 * g[start : start + p.numel()].view_as(p))
                start += p.numel()


def made(monkeypatch, small, **options):
    monkeypatch.setattr(factors, "SMALL_WEIGHT", small)
    torch.manual_seed(0)
    model = EveryKind().double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, K, direction_rank=R, **options)
    return model, optimizer, grad_filter, twin


def assert_same(model, twin):
    for (name, ours), theirs in zip(
        model.named_parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("layout", ["global", "layerwise"])
@pytest.mark.parametrize("small", [0, 1 << 16], ids=["factors", "rows where small"])
def test_every_kind_of_weight_is_filtered_as_its_rows_are(
    rng, monkeypatch, layout, small
):
    model, optimizer, grad_filter, twin = made(monkeypatch, small, layout=layout)
    literal = Twin(twin, layout)
    for _ in range(4):
        x, y = batch(rng)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        literal.step((x, y))
        assert_same(model, twin)
    norms = [
        torch.cat([g.flatten() for g in grads]).norm()
        for grads in (before, [p.grad for p in model.parameters()])
    ]
    assert grad_filter.stats.kept_norm == pytest.approx(float(norms[1] / norms[0]))
    assert 0 < grad_filter.stats.fraction < 1
    assert 0 < grad_filter.stats.drift < 1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(12, 9, bidirectional=True, batch_first=True)
        self.head = nn.Linear(18, 30)

    def forward(self, x):
        return self.head(self.cells(F.one_hot(x % 12, 12).double())[0].mean(1))


class MadeOfOthers(nn.Module):
    """A weight with a norm of its own, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))
        self.twice = nn.Linear(9, 9)
        self.head = nn.Linear(9, 30)

    def forward(self, x):
        h = torch.tanh(self.first(x.double() / 30))
        return self.head(self.twice(torch.tanh(self.twice(h))))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.bag = nn.Embedding(30, 12), nn.EmbeddingBag(30, 12)
        self.layer = nn.TransformerEncoderLayer(12, 2, 14, dropout=0.0)
        self.head = nn.Linear(12, 30)

    def forward(self, x):
        h = self.layer(self.words(x).transpose(0, 1)).mean(0)
        return self.head(h + self.bag(x))


@pytest.mark.parametrize("kind", [Recurrent, MadeOfOthers, TimeFirst])
def test_layers_that_use_weights_in_ways_of_their_own(rng, monkeypatch, kind):
    monkeypatch.setattr(factors, "SMALL_WEIGHT", 0)
    torch.manual_seed(0)
    model = kind().double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, K, direction_rank=R)
    literal = Twin(twin)
    for _ in range(3):
        x, y = batch(rng)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        literal.step((x, y))
        assert_same(model, twin)


def test_mixed_precision_is_filtered(rng):
    model = nn.Sequential(nn.Linear(30, 40), nn.GELU(), nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, 3, direction_rank=2)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 30, generator=rng)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0 < grad_filter.stats.kept_norm < 1
    assert grad_filter.stats.skipped_updates == 0


def test_rows_are_kept_of_no_large_weight(rng, monkeypatch):
    model, _, grad_filter, _ = made(monkeypatch, 0)
    x, y = batch(rng)
    F.cross_entropy(model(x), y).backward()
    taken = grad_filter._source.take_compact()
    layout = Layout(model)
    kinds = {
        slot.name: {type(use.grads).__name__ for use in taken.of(slot.start)}
        for slot in layout.slots
    }
    products = {name for name, kind in kinds.items() if kind == {"Product"}}
    assert products == {
        "words.weight",
        "linear.weight",
        "conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "back.weight",
    }
    assert len(taken.of(0)) == 2  # the words as such, and as the head


def test_several_backward_passes_are_one_batch(rng, monkeypatch):
    model, optimizer, _, twin = made(monkeypatch, 0)
    literal = Twin(twin)
    for _ in range(3):
        first, second = batch(rng, 8), batch(rng, 4)
        optimizer.zero_grad()
        for x, y in (first, second):
            (F.cross_entropy(model(x), y, reduction="sum") / 12).backward()
        optimizer.step()
        literal.step(first, second)
        assert_same(model, twin)


def test_a_second_pass_through_one_graph_is_about_the_same_samples(rng, monkeypatch):
    model, optimizer, _, twin = made(monkeypatch, 0)
    literal = Twin(twin)
    for _ in range(3):
        x, y = batch(rng)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        literal.step((x, y))
        assert_same(model, twin)


def test_steps_between_updates_and_batches_of_one_are_filtered(rng):
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"direction_rank": 2, "update_every": 2}
    grad_filter = dome.attach(model, optimizer, 2, **options)

    def step(num):
        optimizer.zero_grad()
        model(torch.randn(num, 9, generator=rng)).square().mean().backward()
        optimizer.step()
        assert grad_filter.stats.kept_norm < 1

    for num in (6, 6, 6, 1):
        step(num)
    assert grad_filter.trackers["all"].num_updates == 2
    with pytest.warns(RuntimeWarning, match="one sample"):
        step(1)
    assert grad_filter.stats.skipped_updates == 1


@pytest.mark.parametrize("options", [{}, {"layout": "layerwise", "forget": 0.2}])
def test_a_run_goes_on_bit_for_bit(monkeypatch, options):
    ends = []
    for stop in (False, True):
        rng = torch.Generator().manual_seed(0)
        model, optimizer, grad_filter, _ = made(monkeypatch, 0, **options)
        for step in range(6):
            if stop and step == 3:
                saved = grad_filter.state_dict()
                grad_filter.detach()
                grad_filter = dome.attach(
                    model, optimizer, K, direction_rank=R, **options
                )
                grad_filter.load_state_dict(saved)
            x, y = batch(rng)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_loss_that_is_not_finite_leaves_the_directions_alone(rng, monkeypatch):
    model, optimizer, grad_filter, _ = made(monkeypatch, 0)
    x, y = batch(rng)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = grad_filter.trackers["all"].basis
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * torch.nan).backward()
    with pytest.warns(RuntimeWarning, match="not finite"):
        grad_filter.step()
    assert torch.equal(grad_filter.trackers["all"].basis, before)
    assert all(p.grad.isnan().all() for p in model.parameters() if p.dim() > 1)


def test_a_batch_that_is_overwritten_before_the_step_is_named(rng):
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, 2, direction_rank=2)
    x = torch.randn(6, 9, generator=rng)
    model(x).square().mean().backward()
    x.copy_(torch.randn(6, 9, generator=rng))
    with pytest.raises(RuntimeError, match=r"0\.weight.*written to in place"):
        optimizer.step()


def test_a_use_that_was_not_captured_is_named(rng):
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dome.attach(model, optimizer, 2, direction_rank=2)
    x = torch.randn(6, 9, generator=rng)
    loss = model(x).square().mean() + (x @ model[0].weight.T).tanh().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"0\.weight.*miss a part"):
        optimizer.step()


def test_micro_batches_and_own_samples_are_rows(rng):
    model = nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"direction_rank": 2, "samples": "microbatch"}
    with dome.attach(model, optimizer, 2, **options) as grad_filter:
        for _ in range(4):
            model(torch.randn(6, 9, generator=rng)).square().mean().backward()
        optimizer.step()
        assert grad_filter.stats.kept_norm < 1
        dim = sum(p.numel() for p in model.parameters())
        grad_filter.observe(torch.randn(6, dim, generator=rng))
        assert grad_filter.trackers["all"].num_updates == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("basis", [torch.float32, torch.float64])
def test_directions_may_have_another_precision_than_the_model(kind, basis, rng):
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)).to(kind)
    grad_filter = dome.GradientFilter(model, 2, direction_rank=2, basis_dtype=basis)
    x = torch.randn(6, 9, generator=rng, dtype=kind)
    model(x).square().mean().backward()
    given = torch.cat([p.grad.flatten() for p in model.parameters()])
    grad_filter.step()
    U = grad_filter.trackers["all"].basis
    filtered = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (filtered.dtype, U.dtype) == (kind, basis)
    expected = given.double() - U.double() @ (U.double().T @ given.double())
    torch.testing.assert_close(filtered.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kinds", [("float32", "float64"), ("float64", "float32")])
def test_a_model_may_be_converted_to_another_precision(kinds, rng):
    before, after = (getattr(torch, kind) for kind in kinds)
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)).to(before)
    grad_filter = dome.GradientFilter(model, 2, direction_rank=2)
    for kind in (before, before, after, after):
        model.to(kind).zero_grad()
        x = torch.randn(6, 9, generator=rng, dtype=torch.float64)
        model(x.to(kind)).square().mean().backward()
        given = torch.cat([p.grad.flatten() for p in model.parameters()])
        grad_filter.step()
    (tracker,) = grad_filter.trackers.values()
    U = tracker.basis.double()
    filtered = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert tracker.num_updates == 4
    assert (filtered.dtype, tracker.basis.dtype) == (after, before)
    # Whichever of the two is float32 decides how many digits are right.
    expected = given.double() - U @ (U.T @ given.double())
    torch.testing.assert_close(filtered.double(), expected, rtol=0, atol=1e-6)


class Numbers(nn.Module):
    """Parameters that are a single number, a vector and a matrix."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 9))
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.temperature * self.head(x * self.gain)


def test_a_single_number_is_a_parameter_as_any_other():
    ends = []
    for chosen in ({}, {"direction_rank": 5}):
        torch.manual_seed(0)
        model = Numbers().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dome.attach(model, optimizer, 3, **chosen)
        given = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(8, 9, generator=given, dtype=torch.float64)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(8) % 5).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    # As many directions as the matrix has: Algorithm 2, cut nowhere.
    torch.testing.assert_close(*ends, rtol=0, atol=1e-9)


def test_what_comes_behind_the_filter_gets_the_filtered_gradient(rng, monkeypatch):
    seen = []
    model, optimizer, grad_filter, _ = made(
        monkeypatch, 0, after=lambda g: seen.append(g.norm()) or 0 * g
    )
    x, y = batch(rng)
    F.cross_entropy(model(x), y).backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    optimizer.step()
    assert grad_filter.stats.kept_norm == pytest.approx(float(seen[0] / before))
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"direction_rank": 0}, "at least 1"),
        ({"direction_rank": 2, "tracker": "svd"}, 'works with tracker="power" only'),
        ({"direction_rank": 2, "basis_dtype": torch.bfloat16}, "basis_dtype"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        dome.GradientFilter(nn.Linear(9, 8), 2, **options)
