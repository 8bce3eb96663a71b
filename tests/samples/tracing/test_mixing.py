import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss
from samples.models import Then, vector
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")

B = 4
ORDER = torch.tensor([2, 0, 3, 1])
PLACES = torch.tensor([[1, 3, 0, 2], [0, 1, 2, 3], [3, 3, 1, 0], [2, 0, 0, 1]])


def assigned(h):
    out = h.clone()
    out[ORDER] = h
    return out


# Every size is 4, so that no shape tells the samples from the rest.
MIXES = {
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "joined in another order": lambda h: torch.cat([h[1:], h[:1]]),
    "index_select": lambda h: h.index_select(0, ORDER),
    "index": lambda h: h[ORDER],
    "gather": lambda h: h.gather(0, PLACES),
    "take_along_dim": lambda h: h.take_along_dim(PLACES, 0),
    "scatter": lambda h: torch.zeros_like(h).scatter(0, PLACES, h),
    "scatter_add": lambda h: h.scatter_add(0, PLACES, h),
    "index_add": lambda h: h.index_add(0, ORDER, h),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(0, ORDER, h),
    "index_put": lambda h: h.index_put((ORDER,), h),
    "assignment": assigned,
    "masked_scatter": lambda h: h.masked_scatter(PLACES > 1, h),
    "sort": lambda h: h.sort(0).values,
    "topk": lambda h: h.topk(4, 0).values,
    "cumsum": lambda h: h.cumsum(0),
    "centred": lambda h: h - h.mean(0),
    "scaled by the batch": lambda h: h / h.std(),
    "maximum": lambda h: h + h.max(0).values,
    "largest of the others": lambda h: h * h.max(0)[0][:, None],
    "larger of two": lambda h: torch.max(h, h.flip(0)),
    "softmax": lambda h: h.softmax(0),
    "normalize": lambda h: F.normalize(h, dim=0),
    "layer norm across": lambda h: F.layer_norm(h.T, (B,)).T,
    "linear across": lambda h: F.linear(h.T, torch.eye(B)).T,
    "einsum": lambda h: torch.einsum("bi,ci->b", h, h)[:, None] * h,
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "fused attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "matrix from the left": lambda h: torch.ones(B, B) @ h,
    "pairs": lambda h: (h[:, None] - h[None]).sum(1),
    "distances": lambda h: torch.cdist(h, h),
    "covariance": torch.cov,
    "instance norm across": lambda h: F.instance_norm(h.T[None])[0].T,
    "enlarged": lambda h: F.interpolate(h[None, None], scale_factor=3)[0, 0, :4, :4],
    "columns kept short": lambda h: h.renorm(2, 1, 0.1),
    "linear of pairs": lambda h: F.linear(h, h),
    "joined with itself turned": lambda h: torch.cat([h, h.T], 1)[:, 2:6],
    "products of pairs": lambda h: torch.mm(torch.mm(h, h.T), h),
    "mm from the left": lambda h: torch.mm(torch.ones(B, B), h),
    "a table of samples": lambda h: F.embedding(ORDER, h),
    "bags of samples": lambda h: F.embedding_bag(PLACES, h),
    "mixup": lambda h: 0.5 * h + 0.5 * h[ORDER],
}


def model_that(mix, place):
    run = {
        "between": lambda m, x: m.head(mix(m.layer(x))),
        "before": lambda m, x: m.head(m.layer(mix(x))),
        "behind": lambda m, x: mix(m.head(m.layer(x))),
    }[place]
    return Then(run, layer=nn.Linear(4, 4), head=nn.Linear(4, 4))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_parameter_does_not_meet_mixed_samples(mix):
    model = model_that(mix, "between")
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight'.*microbatch"):
        model(torch.randn(B, 4))
    assert torch._C._len_torch_function_stack() == 0
    source.detach()


def written_into_a_view(h):
    out = torch.zeros(B, 4)
    out.view(-1).copy_(h.flip(0).flatten())
    return out


def exchanged_through_views(h):
    out = h.clone()
    out[: B // 2].copy_(h[B // 2 :])
    return out


def joined_with_a_deviation(h):
    deviation = h.view(2, B // 2, 4).std(0).mean()
    return torch.cat([h[:, :3], deviation.expand(B, 1)], 1)


# Mixes that tear the samples apart before they bring them together.
TORN = {
    "groups exchanged": lambda h: h.view(2, B // 2, 4).flip(0).view(B, 4),
    "groups transposed": lambda h: h.view(2, B // 2, 4).transpose(0, 1).reshape(B, 4),
    "groups sorted": lambda h: h.view(2, B // 2, 4).sort(0).values.view(B, 4),
    "groups centred": lambda h: h - h.view(2, B // 2, 4).mean(0).repeat(2, 1),
    "groups in frequencies": lambda h: torch.fft.fft(
        h.view(2, B // 2, 4), dim=0
    ).real.reshape(B, 4),
    "minibatch deviation": joined_with_a_deviation,
    "quantile": lambda h: h / h.quantile(0.5),
    "counted values": lambda h: h / h.histc().max(),
    "largest of the values": lambda h: h / torch.unique(h).max(),
    "entries reversed": lambda h: h.flatten().flip(0).view(B, 4),
    "read as another shape": lambda h: h.T.reshape(B, 4),
    "written into a view": written_into_a_view,
    "exchanged through views": exchanged_through_views,
    "written by out=": lambda h: torch.add(h.flip(0), 0, out=torch.empty_like(h)),
}


@pytest.mark.parametrize("mix", (MIXES | TORN).values(), ids=(MIXES | TORN).keys())
def test_mixed_inputs_count_as_well(mix):
    model = model_that(mix, "before")
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"parameter 'layer.weight'.*microbatch"):
        model(torch.randn(B, 4))
    assert torch._C._len_torch_function_stack() == 0
    source.detach()


def in_place(mix):
    return mix in (TORN["written by out="], TORN["counted values"])


@pytest.mark.parametrize(
    "mix", [m for m in TORN.values() if not in_place(m)], ids=lambda m: m.__name__
)
def test_torn_samples_are_not_met_between_parameters(mix):
    model = model_that(mix, "between")
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight'.*microbatch"):
        model(torch.randn(B, 4))
    source.detach()


def test_samples_written_through_views_stay_where_they_are():
    def run(m, x):
        out = torch.zeros(2, len(x), 4)
        out[0].copy_(x)
        out.transpose(0, 1)[:, 1].add_(m.layer(x))
        out.view(-1).mul_(2.0)
        return m.head(out.transpose(0, 1)).flatten(1)

    model, x = Then(run, layer=nn.Linear(4, 4), head=nn.Linear(4, 3)), torch.randn(B, 4)
    source = PerSample(model, Layout(model))
    sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_pairs_are_told_with_the_way_out():
    model = Then(
        lambda m, x: m.layer(x) @ m.layer(x).T * m.t, layer=nn.Linear(4, 4), t=vector()
    )
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"parameter 't'.*'matmul'.*parameters="):
        model(torch.randn(B, 4))
    source.detach()


def test_operations_without_a_rule_are_tried_once_for_each_shape(monkeypatch):
    calls = []

    def swish(h, *, slope):
        calls.append(len(h))
        return h * (slope * h).sigmoid()

    def odd(h):
        if torch.overrides.has_torch_function_unary(h):
            return torch.overrides.handle_torch_function(odd, (h,), h)
        return swish(h, slope=2.0)

    model = Then(
        lambda m, x: m.head(odd(m.layer(x))),
        layer=nn.Linear(4, 4),
        head=nn.Linear(4, 4),
    )
    source = PerSample(model, Layout(model))
    for _ in range(3):
        sum_loss(model(torch.randn(B, 4))).backward()
    assert calls == [B] * 5  # three passes, two tries
    source.detach()


def shares(model, mix, x):
    """The gradient of the batch loss through each sample alone, the others fixed."""
    rows = []
    for b in range(len(x)):
        h = model.head(model.layer(x))
        own = torch.arange(len(x))[:, None] == b
        loss = sum_loss(mix(torch.where(own, h, h.detach())))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_mix_that_no_parameter_meets_is_part_of_the_loss(mix):
    model, x = model_that(mix, "behind"), torch.randn(B, 4)
    source = PerSample(model, Layout(model))
    sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows.sum(0), Layout(model).gather())
    assert_close(rows, shares(model, mix, x))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_strict_refuses_a_mix_in_the_loss_too(mix):
    model = model_that(mix, "behind")
    source = PerSample(model, Layout(model), strict=RuntimeError)
    with pytest.raises(RuntimeError, match=r"mixes samples by .*detach"):
        model(torch.randn(B, 4))
    source.detach()


def mean_loss(m, x):
    return 0.5 * F.mse_loss(m.layer(x), x.sin()) + m.layer(x).square().mean()


@pytest.mark.parametrize(
    "total",
    [mean_loss, lambda m, x: m.layer(x).square().sum(1).mean() / 3],
    ids=["two terms", "mean"],
)
def test_strict_lets_a_model_return_the_mean_of_its_losses(total):
    model = Then(total, layer=nn.Linear(4, 4))
    source = PerSample(model, Layout(model), strict=RuntimeError)
    model(torch.randn(B, 4)).backward()
    assert_close(source.take().sum(0), Layout(model).gather())
    source.detach()


@pytest.mark.parametrize(
    "total",
    [
        lambda h: h.norm(),
        lambda h: h.logsumexp((0, 1)),
        lambda h: h.sum().sqrt(),
        lambda h: h.mean() * h.mean(),
        lambda h: h.exp().sum().log(),
    ],
    ids=["norm", "logsumexp", "root", "square", "logarithm"],
)
def test_strict_refuses_totals_that_are_no_sum_of_losses(total):
    model = Then(lambda m, x: total(m.layer(x).square()), layer=nn.Linear(4, 4))
    source = PerSample(model, Layout(model), strict=RuntimeError)
    with pytest.raises(RuntimeError, match="mixes samples by"):
        model(torch.randn(B, 4))
    source.detach()


def test_strict_lets_a_rule_do_what_it_needs():
    # Rows of a batch of bags are padded with those of their neighbours, and masked.
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3))
    bags = Then(lambda m, x, starts: m.net[1](m.net[0](x, starts)), net=model)
    source = PerSample(bags, Layout(bags), strict=RuntimeError)
    sum_loss(bags(torch.arange(9), torch.tensor([0, 2, 5]))).backward()
    assert_close(source.take().sum(0), Layout(bags).gather())
    source.detach()


@pytest.mark.parametrize("name", ["centred", "softmax", "cumsum", "index_add"])
def test_allow_mixing_captures_what_is_left_in_place(name):
    model, x = model_that(MIXES[name], "between"), torch.randn(B, 4)
    source = PerSample(model, Layout(model), allow_mixing=True)
    sum_loss(model(x)).backward()
    rows = source.take()
    source.detach()
    assert_close(rows.sum(0), Layout(model).gather())


def test_one_sample_alone_is_never_mixed():
    model = model_that(lambda h: h - h.mean(0) + h.softmax(0).cumsum(0), "between")
    source = PerSample(model, Layout(model))
    sum_loss(model(torch.randn(1, 4))).backward()
    assert_close(source.take()[0], Layout(model).gather())
    source.detach()


def test_statistics_in_a_buffer_are_constants_of_the_next_pass():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            h = self.layer(x)
            out = self.head(h - self.mean)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            return out

    model = Running()
    source = PerSample(model, Layout(model))
    for _ in range(2):
        model.zero_grad()
        sum_loss(model(torch.randn(B, 4))).backward()
        assert_close(source.take().sum(0), Layout(model).gather())
    source.detach()


def test_an_operation_that_has_the_name_of_any_object_is_tried_too():
    class Comparing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.layer(x)
            return self.head(h * h.__eq__(h).to(h.dtype))

    model = Comparing()
    source = PerSample(model, Layout(model))
    sum_loss(model(torch.randn(B, 4))).backward()
    assert_close(source.take().sum(0), Layout(model).gather())
    source.detach()
