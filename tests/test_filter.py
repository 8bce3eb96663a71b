import copy
import io

import pytest
import torch
from models import batches, small_classifier
from reference import fraction
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.reference import Dome, per_sample_loop


def flat_grad(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def literal_twin(model, grad_filter):
    tracker = grad_filter.trackers["all"]
    return Dome(copy.deepcopy(model), tracker.basis.clone())


def test_a_training_run_is_algorithm_one_to_the_letter(rng):
    model = small_classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    grad_filter = dome.attach(model, optimizer, rank=6)
    twin = literal_twin(model, grad_filter)
    twin_optimizer = torch.optim.Adam(twin.model.parameters(), lr=0.01)
    for x, y in batches(rng, 30):
        train_step(model, optimizer, x, y)
        vector = twin.filtered(cross_entropy, x, y)
        sizes = [p.numel() for p in twin.model.parameters()]
        for p, piece in zip(twin.model.parameters(), vector.split(sizes), strict=True):
            p.grad = piece.view_as(p)
        twin_optimizer.step()
        torch.testing.assert_close(flat(model), flat(twin.model))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    ],
)
def test_attaching_equals_stepping_by_hand_with_any_optimizer(make, rng):
    attached, by_hand = small_classifier(), small_classifier()
    attached_optimizer = make(attached.parameters())
    dome.attach(attached, attached_optimizer, rank=5)
    optimizer = make(by_hand.parameters())
    grad_filter = dome.GradientFilter(by_hand, rank=5)
    for x, y in batches(rng, 5):
        train_step(attached, attached_optimizer, x, y)
        optimizer.zero_grad()
        cross_entropy(by_hand(x), y).backward()
        grad_filter.step()
        optimizer.step()
        assert torch.equal(flat(attached), flat(by_hand))


# Torch 2.8 says this of its own line.
@pytest.mark.filterwarnings(
    "ignore:Converting a tensor with requires_grad=True:UserWarning:torch.optim.lbfgs"
)
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_filtered_after_each_of_its_calls(keyword, rng):
    model = small_classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    grad_filter = dome.attach(model, optimizer, rank=5)
    (x, y), *_ = batches(rng, 1, size=40)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    before = cross_entropy(model(x), y).item()
    for _ in range(3):
        if keyword:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
    assert grad_filter.stats.step == len(calls) > 3
    assert cross_entropy(model(x), y).item() < before


def test_an_optimizer_over_some_parameters_is_filtered_on_those_alone(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(
        [{"params": [model[2].weight]}, {"params": [model[2].bias], "lr": 0.01}], lr=0.1
    )
    grad_filter = dome.attach(model, optimizer, rank=4)
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    untouched = model[0].weight.grad.clone()
    head = torch.cat([model[2].weight.grad.reshape(-1), model[2].bias.grad])
    optimizer.step()
    U = grad_filter.trackers["all"].basis
    assert U.shape == (51, 4)
    filtered = torch.cat([model[2].weight.grad.reshape(-1), model[2].bias.grad])
    torch.testing.assert_close(filtered, head - U @ (U.T @ head))
    assert torch.equal(model[0].weight.grad, untouched)


def test_clipping_before_the_filter_scales_and_after_it_bounds(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4)
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    g = flat_grad(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    grad_filter.step()
    U = grad_filter.trackers["all"].basis
    clipped = g * 0.01 / (g.norm() + 1e-6)  # torch's own clipping constant
    torch.testing.assert_close(flat_grad(model), clipped - U @ (U.T @ clipped))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    assert flat_grad(model).norm() <= 1e-4


def test_stats_are_what_their_definitions_say(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=5)
    for step, (x, y) in enumerate(batches(rng, 4), start=1):
        model.zero_grad()
        G = per_sample_loop(model, cross_entropy, x, y)
        cross_entropy(model(x), y).backward()
        before = flat_grad(model)
        old = grad_filter.trackers["all"].basis.clone()
        grad_filter.step()
        new, stats = grad_filter.trackers["all"].basis, grad_filter.stats
        assert stats.step == step
        assert stats.fraction == pytest.approx(float(fraction(new, G)))
        kept = float(flat_grad(model).norm() / before.norm())
        assert stats.kept_norm == pytest.approx(kept)
        cosines = (old.T @ new).square().sum() / 5
        assert stats.drift == pytest.approx(float((1 - cosines).sqrt()), abs=1e-7)
        assert stats.effective_rank == pytest.approx(5)
        assert stats.skipped_updates == 0
        assert stats.orthogonality_error < 1e-12
        assert stats.seconds > 0


def test_stats_before_the_first_step_say_so():
    stats = dome.GradientFilter(small_classifier(), rank=3).stats
    assert stats.step == 0
    assert stats.fraction != stats.fraction  # not a number
    assert stats.kept_norm == 1


def test_layerwise_bases_filter_each_layer_by_itself(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=20, layout="layerwise")
    (x, y), *_ = batches(rng, 1, size=60)
    cross_entropy(model(x), y).backward()
    G = per_sample_loop(model, cross_entropy, x, y)
    g = flat_grad(model)
    grad_filter.step()
    first, second = (grad_filter.trackers[name].basis for name in ("0", "2"))
    assert (first.shape, second.shape) == ((144, 20), (51, 20))
    U = torch.block_diag(first, second)
    torch.testing.assert_close(flat_grad(model), g - U @ (U.T @ g))
    assert grad_filter.stats.fraction == pytest.approx(float(fraction(U, G)))


def test_a_rank_for_each_layer_leaves_layers_not_named_alone(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank={"2": 7}, layout="layerwise")
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    untouched = model[0].weight.grad.clone()
    grad_filter.step()
    assert torch.equal(model[0].weight.grad, untouched)
    assert {n: t.basis.shape for n, t in grad_filter.trackers.items()} == {"2": (51, 7)}
    with pytest.raises(ValueError, match=r"rank names \['conv'\]; the layers here"):
        dome.GradientFilter(model, rank={"conv": 3}, layout="layerwise")


def test_a_layer_smaller_than_the_rank_is_removed_whole(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=60, layout="layerwise")
    assert grad_filter.trackers["2"].basis.shape == (51, 51)


def test_update_every_takes_samples_on_every_nth_step_only(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=4, update_every=3)
    changed = []
    for x, y in batches(rng, 7):
        before = grad_filter.trackers["all"].basis.clone()
        train_step(model, optimizer, x, y)
        basis = grad_filter.trackers["all"].basis
        changed.append(not torch.equal(before, basis))
        g = flat_grad(model)
        assert (basis.T @ g).norm() < 1e-10  # filtered on the steps between as well
    assert changed == [True, False, False, True, False, False, True]


def test_warmup_only_watches(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4, warmup=2)
    kept = []
    for x, y in batches(rng, 4):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
        kept.append(grad_filter.stats.kept_norm)
    assert kept[:2] == [1.0, 1.0]
    assert max(kept[2:]) < 0.999


def test_strength_multiplies_the_removed_part_and_may_follow_the_step(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4, strength=lambda step: step / 4)
    for step, (x, y) in enumerate(batches(rng, 5)):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        g = flat_grad(model)
        grad_filter.step()
        U = grad_filter.trackers["all"].basis
        expected = g - step / 4 * (U @ (U.T @ g))
        torch.testing.assert_close(flat_grad(model), expected)


def test_after_is_applied_in_order_to_the_filtered_gradient(rng):
    model = small_classifier()
    seen = []

    def double(v):
        seen.append(v.clone())
        return 2 * v

    grad_filter = dome.GradientFilter(model, rank=4, after=[double, lambda v: v + 1])
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    g = flat_grad(model)
    grad_filter.step()
    U = grad_filter.trackers["all"].basis
    torch.testing.assert_close(seen[0], g - U @ (U.T @ g))
    torch.testing.assert_close(flat_grad(model), 2 * seen[0] + 1)


def test_after_that_changes_the_length_is_refused(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4, after=lambda v: v[:3])
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"in after returned shape \(3,\)"):
        grad_filter.step()


def test_sum_losses_give_the_same_basis_as_mean_losses(rng):
    mean, total = small_classifier(), small_classifier()
    mean_filter = dome.GradientFilter(mean, rank=4)
    sum_filter = dome.GradientFilter(total, rank=4, loss_reduction="sum")
    for x, y in batches(rng, 3):
        mean.zero_grad()
        total.zero_grad()
        cross_entropy(mean(x), y).backward()
        cross_entropy(total(x), y, reduction="sum").backward()
        mean_filter.step()
        sum_filter.step()
    a, b = mean_filter.trackers["all"], sum_filter.trackers["all"]
    torch.testing.assert_close(a.eigenvalues, b.eigenvalues)
    torch.testing.assert_close(a.basis @ a.basis.T, b.basis @ b.basis.T)


def test_accumulated_micro_batches_equal_one_batch(rng):
    whole, parts = small_classifier(), small_classifier()
    one, other = dome.GradientFilter(whole, rank=4), dome.GradientFilter(parts, rank=4)
    for x, y in batches(rng, 3):
        whole.zero_grad()
        parts.zero_grad()
        cross_entropy(whole(x), y).backward()
        for i in range(0, 12, 4):
            (cross_entropy(parts(x[i : i + 4]), y[i : i + 4]) / 3).backward()
        one.step()
        other.step()
        torch.testing.assert_close(flat_grad(whole), flat_grad(parts))
    torch.testing.assert_close(
        one.trackers["all"].eigenvalues, other.trackers["all"].eigenvalues
    )


def test_a_grad_scaler_does_not_change_the_basis(rng):
    plain, scaled = small_classifier(torch.float32), small_classifier(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    one = dome.attach(plain, plain_optimizer, rank=4)
    other = dome.attach(scaled, optimizer, rank=4, scaler=scaler)
    for x, y in batches(rng, 5, dtype=torch.float32):
        train_step(plain, plain_optimizer, x, y)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(scaled(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    # Powers of two scale without rounding.
    assert torch.equal(
        one.trackers["all"].eigenvalues, other.trackers["all"].eigenvalues
    )
    assert torch.equal(flat(plain), flat(scaled))


def test_a_step_that_the_scaler_skips_leaves_no_samples_behind(rng):
    model = small_classifier(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=4, scaler=scaler)
    for i, (x, y) in enumerate(batches(rng, 4, dtype=torch.float32)):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y) * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert grad_filter.stats.step == 3
    assert grad_filter.stats.skipped_updates == 0
    assert flat(model).isfinite().all()


def test_microbatch_samples_track_a_model_with_batch_norm(rng):
    model = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    grad_filter = dome.GradientFilter(model, rank=3, samples="microbatch")
    (x, y), *_ = batches(rng, 1, size=48)
    rows, total = [], 0
    for i in range(0, 48, 8):
        (cross_entropy(model(x[i : i + 8]), y[i : i + 8]) / 6).backward()
        rows.append(flat_grad(model) - total)
        total = flat_grad(model).clone()
    twin = dome.StreamingPower(len(total), 3, dtype=torch.float64)
    twin.update(6 * torch.stack(rows))
    grad_filter.step()
    torch.testing.assert_close(
        grad_filter.trackers["all"].eigenvalues, twin.eigenvalues
    )
    torch.testing.assert_close(flat_grad(model), twin.project_out(total))


def test_observed_samples_of_ones_own_turn_the_basis(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4)
    G = torch.randn(9, 195, generator=rng, dtype=torch.float64)
    grad_filter.observe(G)
    twin = dome.StreamingPower(195, 4, dtype=torch.float64)
    twin.update(G)
    assert torch.equal(twin.basis, grad_filter.trackers["all"].basis)
    with pytest.raises(ValueError, match=r"samples must have shape \(B, 195\)"):
        grad_filter.observe(G[:, :10])


def test_a_gradient_that_is_not_finite_stays_where_it_is(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4)
    (x, y), (x2, y2) = batches(rng, 2)
    cross_entropy(model(x), y).backward()
    grad_filter.step()
    model.zero_grad()
    x2[0] = float("nan")
    cross_entropy(model(x2), y2).backward()
    with pytest.warns(RuntimeWarning, match="not finite"):
        grad_filter.step()
    assert grad_filter.stats.skipped_updates == 1
    assert grad_filter.trackers["all"].basis.isfinite().all()


def test_stats_survive_a_batch_that_one_layer_leaves_out(rng):
    grad_filter = dome.GradientFilter(small_classifier(), rank=4, layout="layerwise")
    G = torch.randn(12, 195, generator=rng, dtype=torch.float64)
    grad_filter.observe(G)
    G[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="not finite"):
        grad_filter.observe(G[:8])
    stats = grad_filter.stats
    assert 0 < stats.fraction < 1
    assert stats.skipped_updates == 1


def test_a_batch_of_one_is_filtered_but_not_learned_from(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4)
    (x, y), (x2, y2) = batches(rng, 2)
    cross_entropy(model(x), y).backward()
    grad_filter.step()
    basis = grad_filter.trackers["all"].basis.clone()
    model.zero_grad()
    cross_entropy(model(x2[:1]), y2[:1]).backward()
    with pytest.warns(RuntimeWarning, match="one sample"):
        grad_filter.step()
    assert torch.equal(basis, grad_filter.trackers["all"].basis)
    assert (basis.T @ flat_grad(model)).norm() < 1e-12


def test_detach_leaves_model_and_optimizer_as_they_were(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dome.attach(model, optimizer, rank=4) as grad_filter:
        (x, y), *_ = batches(rng, 1)
        train_step(model, optimizer, x, y)
    grad_filter.detach()
    assert not optimizer._optimizer_step_pre_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    before = grad_filter.stats.step
    train_step(model, optimizer, x, y)
    assert grad_filter.stats.step == before


def test_a_second_filter_on_the_same_optimizer_is_refused_until_the_first_is_gone():
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = dome.attach(model, optimizer, rank=4)
    with pytest.raises(RuntimeError, match="already has a filter"):
        dome.attach(model, optimizer, rank=4)
    first.detach()
    dome.attach(model, optimizer, rank=4)


@pytest.mark.parametrize("tracker", ["power", "svd"])
@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_a_run_resumes_bit_for_bit_from_safetensors(tracker, layout, rng, tmp_path):
    data = list(batches(rng, 12))

    def start(noise_seed):
        model = small_classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        noise = torch.Generator().manual_seed(noise_seed)
        sketch = dome.compression.GaussianSketch(3.0, generator=noise)
        grad_filter = dome.attach(
            model,
            optimizer,
            rank=6,
            tracker=tracker,
            layout=layout,
            after=sketch,
            update_every=2,
        )
        return model, optimizer, grad_filter

    model, optimizer, grad_filter = start(1)
    for x, y in data[:5]:
        train_step(model, optimizer, x, y)
    save_file(grad_filter.state_dict(), tmp_path / "filter.safetensors")
    saved = io.BytesIO()
    torch.save(
        [model.state_dict(), optimizer.state_dict(), grad_filter.state_dict()], saved
    )
    for x, y in data[5:]:
        train_step(model, optimizer, x, y)

    for from_file in (False, True):
        saved.seek(0)
        weights, moments, loaded = torch.load(saved, weights_only=True)
        if from_file:
            loaded = load_file(tmp_path / "filter.safetensors")
        again, again_optimizer, again_filter = start(99)
        again.load_state_dict(weights)
        again_optimizer.load_state_dict(moments)
        again_filter.load_state_dict(loaded)
        for x, y in data[5:]:
            train_step(again, again_optimizer, x, y)
        assert torch.equal(flat(model), flat(again))
        assert again_filter.stats.step == 12


def test_a_checkpoint_of_another_model_rank_layout_or_tracker_is_refused_by_name():
    saved = dome.GradientFilter(small_classifier(), rank=4).state_dict()
    other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).double()
    wider = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3), nn.Linear(3, 3)
    )

    def load(model, **options):
        options = {"rank": 4} | options
        dome.GradientFilter(model, **options).load_state_dict(saved)

    with pytest.raises(
        ValueError, match=r"parameter '2.weight' has shape \(5, 16\) here"
    ):
        load(other)
    with pytest.raises(ValueError, match=r"has no parameter '3.weight'"):
        load(wider.double())
    with pytest.raises(ValueError, match=r"has parameter '2.bias', which is not"):
        load(nn.Sequential(nn.Linear(8, 16)).double())
    with pytest.raises(
        ValueError, match=r"block 'all' .* tracks 4 directions.*and 5 here"
    ):
        load(small_classifier(), rank=5)
    with pytest.raises(ValueError, match=r"bases for 'all', this filter for '0', '2'"):
        load(small_classifier(), layout="layerwise")
    with pytest.raises(ValueError, match="written by another tracker"):
        load(small_classifier(), tracker="svd")
    with pytest.raises(ValueError, match=r"stored as torch\.float64"):
        load(small_classifier(), basis_dtype=torch.float32)
    with pytest.raises(ValueError, match="not a state of a GradientFilter"):
        dome.GradientFilter(small_classifier(), rank=4).load_state_dict({})


@pytest.mark.parametrize("tracker", ["power", "svd"])
def test_a_filter_that_has_stepped_goes_back_to_a_state_from_before(tracker, rng):
    options = {"rank": 4, "oversample": 3, "tracker": tracker}
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, **options)
    start = {k: v.clone() for k, v in grad_filter.state_dict().items()}
    for x, y in batches(rng, 3):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
    grad_filter.load_state_dict(start)
    again = grad_filter.state_dict()
    assert again.keys() == start.keys()
    assert all(torch.equal(value, again[key]) for key, value in start.items())


def test_a_refused_checkpoint_changes_nothing(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4)
    before = {k: v.clone() for k, v in grad_filter.state_dict().items()}
    saved = dome.GradientFilter(
        small_classifier(), rank=4, generator=torch.Generator().manual_seed(5)
    ).state_dict()
    saved["parameters.0.weight"] = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="another model"):
        grad_filter.load_state_dict(saved)
    after = grad_filter.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be between 1"),
        ({"rank": 2.5}, "rank must be a whole number, got 2.5"),
        ({"rank": None}, "rank must be a whole number, got None"),
        ({"rank": {"all": True}}, "rank of 'all' must be a whole number"),
        ({"update_every": 1.5}, "update_every must be a whole number"),
        ({"direction_rank": "2"}, "direction_rank must be a whole number, got '2'"),
        ({"rank": 196}, "number of parameters 195, got 196"),
        ({"rank": 0, "layout": "layerwise"}, "rank must be at least 1"),
        ({"tracker": "oja"}, r"tracker must be one of \('power', 'svd'\)"),
        ({"layout": "rows"}, "layout must be one of"),
        ({"samples": "batch"}, "samples must be one of"),
        ({"update_every": 0}, "update_every must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"strength": 1.5}, "strength must lie between 0"),
        ({"forget": 0.0}, "forget must be None"),
        ({"oversample": -2}, "oversample must be at least 0, got -2"),
        ({"loss_reduction": "max"}, "loss_reduction must be one of"),
        ({"basis_dtype": torch.float16}, "dtype must be one of"),
        (
            {"tracker": dome.StreamingPower, "forget": 0.1},
            "belong to the named trackers",
        ),
    ],
)
def test_bad_options_are_refused_by_name_before_anything_happens(options, message):
    model = small_classifier()
    with pytest.raises(ValueError, match=message):
        dome.GradientFilter(model, **({"rank": 3} | options))
    assert not model._forward_hooks


def test_a_model_without_trainable_parameters_is_refused():
    model = small_classifier().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        dome.GradientFilter(model, rank=1)
    other = small_classifier()
    with pytest.raises(ValueError, match="that the optimizer also holds"):
        dome.attach(
            small_classifier(), torch.optim.SGD(other.parameters(), lr=0.1), rank=1
        )


def test_a_tracker_of_ones_own_is_used(rng):
    made = []

    def make(dim, rank):
        made.append((dim, rank))
        return dome.IncrementalSVD(dim, rank, dtype=torch.float64)

    model = small_classifier()
    grad_filter = dome.GradientFilter(model, rank=4, tracker=make)
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    grad_filter.step()
    assert made == [(195, 4)]
    assert grad_filter.stats.effective_rank == 4


def test_bfloat16_storage_halves_the_basis_and_filters_nearly_the_same(rng):
    full, half = small_classifier(torch.float32), small_classifier(torch.float32)
    one = dome.GradientFilter(full, rank=4)
    other = dome.GradientFilter(half, rank=4, basis_dtype=torch.bfloat16)
    for x, y in batches(rng, 5, dtype=torch.float32):
        full.zero_grad()
        half.zero_grad()
        cross_entropy(full(x), y).backward()
        cross_entropy(half(x), y).backward()
        one.step()
        other.step()
    assert other.state_dict()["blocks.all.basis"].dtype == torch.bfloat16
    # Eight bits of mantissa in each entry of the basis.
    difference = (flat_grad(full) - flat_grad(half)).norm() / flat_grad(full).norm()
    assert difference < 0.02


def test_filtering_inside_a_scheduler_loop_leaves_the_schedule_alone(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    dome.attach(model, optimizer, rank=4)
    for x, y in batches(rng, 3):
        train_step(model, optimizer, x, y)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("choice", ["2.*", ["2.weight", "2.bias"], "tensors"])
def test_parameters_are_chosen_by_tensors_names_or_patterns(choice, rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = list(model[2].parameters()) if choice == "tensors" else choice
    grad_filter = dome.attach(model, optimizer, rank=3, parameters=wanted)
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    untouched = model[0].weight.grad.clone()
    optimizer.step()
    assert grad_filter.trackers["all"].basis.shape == (51, 3)
    assert torch.equal(model[0].weight.grad, untouched)


def test_a_pattern_that_matches_no_parameter_is_named():
    with pytest.raises(ValueError, match=r"called 'heads\.\*': there are 4"):
        dome.GradientFilter(small_classifier(), rank=3, parameters=["heads.*"])


def test_a_filter_is_not_copied():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=1)
    with pytest.raises(TypeError, match=r"GradientFilter.*load_state_dict"):
        copy.deepcopy((model, optimizer, grad_filter))
    copy.deepcopy((model, optimizer))
    grad_filter.detach()
