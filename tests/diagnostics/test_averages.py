import math

import pytest
import torch
from models import small_classifier
from reference import noise_scale, projector
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.trackers.low_rank import LENGTHS_EVERY

DIM = 12
SPREAD = torch.tensor([9.0, 4.0] + [0.25] * (DIM - 2), dtype=torch.float64)
MEAN = torch.full((DIM,), 0.5, dtype=torch.float64)


class Dot(nn.Module):
    """The gradient of each sample's term of the loss is the sample itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight


def samples(rng, num):
    shape = (num, DIM)
    return MEAN + SPREAD.sqrt() * torch.randn(shape, generator=rng, dtype=torch.float64)


def batches(rng, num, size=12):
    """Samples of one class, whose gradients agree."""
    for _ in range(num):
        x = 1 + torch.randn(size, 8, generator=rng, dtype=torch.float64)
        yield x, torch.zeros(size, dtype=torch.long)


def stepped(model, grad_filter, *parts):
    """One step on micro-batches of one size; the projector from before it."""
    blocks = [
        projector(t.basis.double().clone()) for t in grad_filter.trackers.values()
    ]
    model.zero_grad()
    for loss in parts:
        (loss / len(parts)).backward()
    grad_filter.step()
    return torch.block_diag(*blocks)


def test_noise_scales_are_those_of_the_distribution(rng):
    model = Dot()
    grad_filter = dome.GradientFilter(model, 2)
    for _ in range(600):
        stepped(model, grad_filter, model(samples(rng, 64)).mean())
    stats = grad_filter.stats
    inside, outside = SPREAD[:2].sum() / MEAN[:2].square().sum(), 2.5 / 2.5
    # 100 batches of 64: a standard error of about 8 % inside and 3 % outside.
    assert stats.noise_scale_inside == pytest.approx(float(inside), rel=0.25)
    assert stats.noise_scale_outside == pytest.approx(outside, rel=0.1)


@pytest.mark.parametrize("layout", ["global", "layerwise"])
@pytest.mark.parametrize("tracker", ["power", "svd"])
@pytest.mark.parametrize("oversample", [0, 2])
def test_noise_scales_are_what_explicit_projections_give(
    rng, layout, tracker, oversample
):
    model = small_classifier()
    grad_filter = dome.GradientFilter(
        model, 3, layout=layout, tracker=tracker, oversample=oversample
    )
    rows, inside = [], []
    for x, y in batches(rng, 5):
        rows.append(dome.per_sample_gradients(model, cross_entropy, x, y))
        inside.append(stepped(model, grad_filter, cross_entropy(model(x), y)))
    rows, inside = rows[1:], inside[1:]  # before the first batch nothing is removed
    eye = torch.eye(len(inside[0]), dtype=torch.float64)
    stats = grad_filter.stats
    expected = noise_scale(rows, inside)
    assert stats.noise_scale_inside == pytest.approx(expected, rel=1e-6)
    expected = noise_scale(rows, [eye - P for P in inside])
    assert stats.noise_scale_outside == pytest.approx(expected, rel=1e-6)


def test_samples_of_skipped_updates_are_not_counted_twice(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3, update_every=2)
    rows, inside = [], []
    for i, (x, y) in enumerate(batches(rng, 7)):
        G = dome.per_sample_gradients(model, cross_entropy, x, y)
        P = stepped(model, grad_filter, cross_entropy(model(x), y))
        if i and i % 2 == 0:
            rows.append(G)
            inside.append(P)
    found = grad_filter.stats.noise_scale_inside
    assert found == pytest.approx(noise_scale(rows, inside, every=2), rel=1e-6)


def test_micro_batches_count_the_samples_of_the_data_in_each(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3, samples="microbatch")
    rows, inside = [], []
    for _ in range(5):
        parts = list(batches(rng, 4, size=6))
        G = [dome.per_sample_gradients(model, cross_entropy, x, y) for x, y in parts]
        rows.append(torch.stack([g.mean(dim=0) for g in G]))
        losses = [cross_entropy(model(x), y) for x, y in parts]
        inside.append(stepped(model, grad_filter, *losses))
    expected = noise_scale(rows[1:], inside[1:], num=6)
    assert grad_filter.stats.noise_scale_inside == pytest.approx(expected, rel=1e-6)


def test_micro_batches_of_a_loss_without_a_call_of_the_model_have_no_scale(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3, samples="microbatch")
    for _ in range(3):
        for x, y in batches(rng, 2):
            loss = cross_entropy(model.forward(x), y) / 2
            grad_filter.expect_backward(loss)
            loss.backward()
        grad_filter.step()
        model.zero_grad()
    assert math.isnan(grad_filter.stats.noise_scale_inside)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_directions_of_low_rank_have_fraction_noise_and_signal(rng, layout, reduction):
    model = small_classifier()
    grad_filter = dome.GradientFilter(
        model, 3, direction_rank=2, layout=layout, loss_reduction=reduction
    )
    rows, inside = [], []
    for i, (x, y) in enumerate(batches(rng, LENGTHS_EVERY + 4)):
        G = dome.per_sample_gradients(model, cross_entropy, x, y)
        loss = cross_entropy(model(x), y, reduction=reduction)
        P = stepped(model, grad_filter, loss)
        if i in (1, LENGTHS_EVERY + 1):
            rows.append(G)
            inside.append(P)
    stats = grad_filter.stats
    eye = torch.eye(len(inside[0]), dtype=torch.float64)
    expected = noise_scale(rows, inside, every=LENGTHS_EVERY)
    assert stats.noise_scale_inside == pytest.approx(expected, rel=1e-6)
    left = [eye - P for P in inside]
    expected = noise_scale(rows, left, every=LENGTHS_EVERY)
    assert stats.noise_scale_outside == pytest.approx(expected, rel=1e-6)
    G, P = rows[-1], inside[-1]
    fraction = ((G @ P).norm(dim=1) / G.norm(dim=1)).mean()
    assert stats.fraction == pytest.approx(float(fraction), rel=1e-6)
    expected = len(G) / noise_scale(rows, [eye, eye], every=LENGTHS_EVERY)
    assert stats.signal_to_noise == pytest.approx(expected, rel=1e-6)


def test_a_gradient_with_other_blocks_in_it_has_no_scale_of_low_rank(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(
        model, {"0": 3}, direction_rank=2, layout="layerwise"
    )
    for x, y in batches(rng, 3):
        stepped(model, grad_filter, cross_entropy(model(x), y))
    assert math.isnan(grad_filter.stats.noise_scale_inside)


class WithUnused(nn.Module):
    """A layer whose gradients are zero."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.off = inner, nn.Linear(8, 3).double()

    def forward(self, x):
        return self.inner(x) + 0 * self.off(x)


@pytest.mark.parametrize("more", [{}, {"direction_rank": 2}])
def test_a_layer_without_variance_has_nothing_inside(rng, more):
    model = WithUnused(small_classifier())
    grad_filter = dome.GradientFilter(model, 3, layout="layerwise", **more)
    for x, y in batches(rng, 3):
        stepped(model, grad_filter, cross_entropy(model(x), y))
    assert math.isfinite(grad_filter.stats.noise_scale_outside)


def test_bytes_factor_is_the_mean_of_squares_of_filtered_steps(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3, warmup=2)
    assert math.isnan(grad_filter.stats.bytes_factor)
    kept = []
    for x, y in batches(rng, 6):
        stepped(model, grad_filter, cross_entropy(model(x), y))
        kept.append(grad_filter.stats.kept_norm)
    assert kept[:2] == [1.0, 1.0]
    weights = [0.99**i for i in (3, 2, 1, 0)]
    mean = sum(w * k**2 for w, k in zip(weights, kept[2:], strict=True)) / sum(weights)
    assert grad_filter.stats.bytes_factor == pytest.approx(1 / mean)


def test_a_loaded_state_begins_the_averages_anew(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3)
    for x, y in batches(rng, 3):
        stepped(model, grad_filter, cross_entropy(model(x), y))
    grad_filter.load_state_dict(grad_filter.state_dict())
    assert math.isnan(grad_filter.stats.bytes_factor)


def test_a_step_that_is_not_finite_is_left_out(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3)
    kept = []
    for i, (x, y) in enumerate(batches(rng, 4)):
        loss = cross_entropy(model(x), y) * (math.nan if i == 2 else 1.0)
        if i == 2:
            with pytest.warns(RuntimeWarning, match="not finite"):
                stepped(model, grad_filter, loss)
        else:
            stepped(model, grad_filter, loss)
            kept.append(grad_filter.stats.kept_norm**2)
    weights = [0.99**i for i in (3, 2, 0)]
    mean = sum(w * k for w, k in zip(weights, kept, strict=True)) / sum(weights)
    assert grad_filter.stats.bytes_factor == pytest.approx(1 / mean)
