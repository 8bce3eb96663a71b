"""What is checked of the communication hook inside worker processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from checks import Place, batches, flat, mine, rng, same_everywhere, sgd, step
from models import small_classifier
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dome
import dome.distributed
from dome.compression import ErrorFeedback, PowerSGD, RandomK, TopK

__all__ = ["CHECKS", "Place"]
CHECKS = {}
SMALL = (
    0.0004  # megabytes: each of the four parameters gets a bucket of its own, nearly
)
SHAPES = [(16, 8), (16,), (3, 16), (3,)]


def check(function):
    CHECKS[function.__name__] = function
    return function


def hooked(rank=4, model=None, ddp=None, **options):
    """A DDP model with the hook, its optimizer and the hook's state."""
    model = DistributedDataParallel(
        model or small_classifier(), **({"bucket_cap_mb": SMALL} | (ddp or {}))
    )
    state = dome.distributed.HookState(model, rank, **options)
    model.register_comm_hook(state, dome.distributed.hook)
    return model, sgd(model), state


class Literal:
    """The same by hand: each worker filters its gradient, then they are averaged."""

    def __init__(self, place, rank=4, model=None, send=None, **options):
        self.place, self.send = place, send or self.mean
        self.model = model or small_classifier()
        self.optimizer = sgd(self.model)
        self.filter = dome.GradientFilter(self.model, rank, **options)

    def mean(self, g):
        dist.all_reduce(g)
        return g / self.place.size

    def step(self, x, y):
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.filter.step()
        g = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()])
        parts = self.send(g).split([p.numel() for p in self.model.parameters()])
        for p, part in zip(self.model.parameters(), parts, strict=True):
            p.grad.copy_(part.view_as(p))
        self.optimizer.step()


def compare(place, num_steps=8, model=small_classifier, data=batches, **options):
    """The largest difference of parameters between the hook and by hand."""
    options = {"rank": 4, **options}
    ddp = options.pop("ddp", None)
    twin = Literal(place, model=model(), **copy.deepcopy(options))
    ours, optimizer, state = hooked(model=model(), ddp=ddp, **copy.deepcopy(options))
    worst = 0.0
    for x, y in data(rng(), num_steps):
        step(ours, optimizer, mine(place, x), mine(place, y))
        twin.step(mine(place, x), mine(place, y))
        worst = max(worst, float((flat(ours) - flat(twin.model)).abs().max()))
        same_everywhere(place, flat(ours))
    assert state.stats.step == num_steps
    assert state.stats.kept_norm == pytest.approx(twin.filter.stats.kept_norm, rel=1e-6)
    assert 0 < state.stats.kept_norm < 1
    state.detach()
    return worst


def compare_with_attach(place, attach, **options):
    """The same between the hook and ``dome.distributed.attach``."""
    common = {"rank": 4, **options}
    model = DistributedDataParallel(small_classifier())
    optimizer = sgd(model)
    other = dome.distributed.attach(model, optimizer, **copy.deepcopy(common | attach))
    inner = copy.deepcopy(attach.get("compressor"))
    samples = attach.get("samples", "per_sample")
    ours, own_optimizer, state = hooked(inner=inner, samples=samples, **common)
    worst = 0.0
    for x, y in batches(rng(), 10):
        step(model, optimizer, mine(place, x), mine(place, y))
        step(ours, own_optimizer, mine(place, x), mine(place, y))
        worst = max(worst, float((flat(ours) - flat(model)).abs().max()))
        same_everywhere(place, flat(ours))
    if samples == "per_sample":  # else that of the average, which no worker has here
        assert state.stats.kept_norm == pytest.approx(other.stats.kept_norm, rel=1e-6)
    assert state.stats.kept_norm < 1
    other.detach()
    return worst


@check
def each_worker_filters_its_gradient_and_the_average_is_sent(place):
    for options in (
        {},
        {"layout": "layerwise", "rank": 2},
        {"layout": "layerwise", "rank": {"2": 2}},
        {"tracker": "svd", "update_every": 2},
        {"warmup": 3, "strength": 0.5, "forget": 0.3},
    ):
        assert compare(place, **options) < 1e-9


@check
def it_survives_what_ddp_does_with_its_buckets(place):
    for ddp in (
        {"bucket_cap_mb": 25},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        assert compare(place, layout="layerwise", rank=2, ddp=ddp) < 1e-9
        assert compare(place, ddp=ddp) < 1e-9


class WithIdleLayer(nn.Module):
    """A layer that no sample reaches, one without numbers, two that all reach."""

    def __init__(self):
        super().__init__()
        first, relu, last = small_classifier()
        self.first, self.relu, self.idle = first, relu, nn.Linear(4, 4).double()
        self.last, self.empty = last, nn.Parameter(torch.zeros(0).double())

    def forward(self, x):
        return self.last(self.relu(self.first(x))) + self.empty.sum()


@check
def layers_without_a_gradient_are_left_alone(place):
    torch.manual_seed(0)
    made = WithIdleLayer()
    options = {"ddp": {"find_unused_parameters": True}, "model": made}
    before = made.idle.weight.clone()
    model, optimizer, state = hooked(layout="layerwise", rank=2, **options)
    twin, twin_optimizer, _ = hooked(layout="layerwise", rank=2)
    for x, y in batches(rng(), 6):
        step(model, optimizer, mine(place, x), mine(place, y))
        step(twin, twin_optimizer, mine(place, x), mine(place, y))
    assert torch.equal(made.idle.weight, before)
    # Sums over workers in buckets of other lengths are rounded in another order.
    torch.testing.assert_close(made.last.weight, twin.module[2].weight)
    assert state.stats.kept_norm < 1


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def images(generator, num):
    for x, y in batches(generator, num):
        yield x[:, :, None, None].expand(-1, -1, 2, 4).reshape(-1, 4, 4, 4)[:, :2], y


@check
def parameters_in_channels_last_are_filtered_as_they_are(place):
    assert convolutions()[0].weight.stride() == (18, 1, 6, 2)
    for options in ({}, {"ddp": {"gradient_as_bucket_view": True}}):
        worst = compare(place, model=convolutions, data=images, **options)
        assert worst < 1e-9
    assert worker_by_hand(place, convolutions, images) < 1e-9


def worker_by_hand(place, make=small_classifier, data=batches, **options):
    """Workers' gradients as samples, gathered and given to ``observe`` by hand."""
    model, optimizer, _ = hooked(model=make(), samples="worker", **options)
    twin = make()
    twin_optimizer, tracker = sgd(twin), dome.GradientFilter(twin, 4)
    worst = 0.0
    for x, y in data(rng(), 6):
        step(model, optimizer, mine(place, x), mine(place, y))
        rows = []
        with tracker.paused():
            for part in range(place.size):
                twin_optimizer.zero_grad()
                x_part, y_part = (t.chunk(place.size)[part] for t in (x, y))
                cross_entropy(twin(x_part), y_part).backward()
                rows.append(torch.cat([p.grad.reshape(-1) for p in twin.parameters()]))
        tracker.observe(torch.stack(rows))
        mean = torch.stack(rows).mean(dim=0)
        parts = mean.split([p.numel() for p in twin.parameters()])
        for p, part in zip(twin.parameters(), parts, strict=True):
            p.grad.copy_(part.view_as(p))
        tracker.filter_()
        twin_optimizer.step()
        worst = max(worst, float((flat(model) - flat(twin)).abs().max()))
        same_everywhere(place, flat(model))
    return worst


@check
def with_workers_as_samples_all_have_one_basis_as_attach_does(place):
    assert worker_by_hand(place) < 1e-9
    worker = {"samples": "worker"}
    for options in (
        {},
        {"layout": "layerwise", "rank": 2},
        {"update_every": 3, "generator": torch.Generator().manual_seed(place.rank)},
    ):
        assert compare_with_attach(place, worker, **options) < 1e-9
    static = {"static_graph": True, "gradient_as_bucket_view": True}
    assert worker_by_hand(place, ddp=static) < 1e-9


@check
def workers_as_samples_take_accumulated_gradients(place):
    model, optimizer, state = hooked(samples="worker")
    twin, twin_optimizer, _ = hooked(samples="worker")
    for x, y in batches(rng(), 5):
        own_x, own_y = mine(place, x), mine(place, y)
        step(twin, twin_optimizer, own_x, own_y)
        optimizer.zero_grad()
        with model.no_sync():
            (cross_entropy(model(own_x[::2]), own_y[::2]) / 2).backward()
        (cross_entropy(model(own_x[1::2]), own_y[1::2]) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-9)
    assert state.stats.step == 5


@check
def compressors_send_what_attach_sends(place):
    for make in (
        lambda: ErrorFeedback(TopK(4.0)),
        lambda: RandomK(4.0, seed=3),
        lambda: ErrorFeedback(PowerSGD(SHAPES)),
    ):
        for options in ({}, {"layout": "layerwise", "rank": 2}):
            compressed = {"compressor": make()}
            assert compare_with_attach(place, compressed, **options) < 1e-9


@check
def an_inner_hook_gets_what_is_filtered(place):
    twin = Literal(place, layout="layerwise", rank=2, send=lambda g: bfloat16(place, g))
    inner = default_hooks.bf16_compress_hook
    model, optimizer, _ = hooked(layout="layerwise", rank=2, inner=inner)
    for x, y in batches(rng(), 6):
        step(model, optimizer, mine(place, x), mine(place, y))
        twin.step(mine(place, x), mine(place, y))
        same_everywhere(place, flat(model))
    # Sums of three numbers of eight bits depend on their order, that of two do not.
    close = 1e-9 if place.size == 2 else 2e-3
    torch.testing.assert_close(flat(model), flat(twin.model), rtol=0, atol=close)


def bfloat16(place, g):
    half = g.to(torch.bfloat16) / place.size
    dist.all_reduce(half)
    return half.double()


def power_sgd_state():
    # Torch's own needs two steps without it, in which buckets are rebuilt.
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1
    )


@check
def power_sgd_compresses_what_has_nothing_in_the_span(place):
    for options in ({"samples": "worker", "update_every": 2}, {"layout": "layerwise"}):
        given = {}

        def spy(state, bucket, given=given):
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                given[p] = grad.flatten().clone()
            return powerSGD_hook.powerSGD_hook(state, bucket)

        own = power_sgd_state()
        model, optimizer, state = hooked(2, inner=spy, inner_state=own, **options)
        for x, y in batches(rng(), 8):
            step(model, optimizer, mine(place, x), mine(place, y))
            same_everywhere(place, flat(model))
            g = torch.cat([given[p] for p in model.parameters()])
            for tracker, part in zip(
                state.trackers.values(), g.split(sizes(state.trackers)), strict=True
            ):
                assert (tracker.basis.T @ part).norm() < 1e-12
        assert own.iter >= 3
        assert own.compression_stats()[0] > 1
        assert state.stats.kept_norm < 1


def sizes(trackers):
    return [len(tracker.basis) for tracker in trackers.values()]


@check
def with_layerwise_bases_a_bucket_is_sent_while_backward_goes_on(place):
    for layout, samples in (("layerwise", "per_sample"), ("layerwise", "worker")):
        events = []

        def spy(group, bucket, events=events):
            events.append("sent")
            return default_hooks.allreduce_hook(group, bucket)

        layers = [nn.Linear(8, 8).double() for _ in range(5)]
        model, optimizer, _ = hooked(
            2, nn.Sequential(*layers), layout=layout, samples=samples, inner=spy
        )
        layers[0].weight.register_hook(lambda _, events=events: events.append("first"))
        for number, (x, y) in enumerate(batches(rng(), 3)):
            events.clear()
            step(model, optimizer, mine(place, x), mine(place, y))
            if number:  # at the first step DDP has one bucket
                assert events.index("first") >= 2, events
                assert events.count("sent") > events.index("first")


@check
def power_sgd_behind_an_idle_filter_is_power_sgd(place):
    plain = DistributedDataParallel(small_classifier(), bucket_cap_mb=25)
    plain.register_comm_hook(power_sgd_state(), powerSGD_hook.powerSGD_hook)
    plain_optimizer = sgd(plain)
    model, optimizer, _ = hooked(
        ddp={"bucket_cap_mb": 25},
        strength=0.0,
        inner=powerSGD_hook.powerSGD_hook,
        inner_state=power_sgd_state(),
    )
    for x, y in batches(rng(), 8):
        step(plain, plain_optimizer, mine(place, x), mine(place, y))
        step(model, optimizer, mine(place, x), mine(place, y))
        assert torch.equal(flat(plain), flat(model))


@check
def a_grad_scaler_changes_nothing_but_skips_what_overflows(place):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for options in ({}, {"samples": "worker"}, {"layout": "layerwise"}):
        model, optimizer, state = hooked(2, scaler=scaler, **options)
        twin, twin_optimizer, _ = hooked(2, **options)
        for number, (x, y) in enumerate(batches(rng(), 6)):
            before = flat(model).clone()
            overflows = number == 3
            step(twin, twin_optimizer, mine(place, x), mine(place, y))
            optimizer.zero_grad()
            loss = cross_entropy(model(mine(place, x)), mine(place, y))
            # One worker's gradient is not finite: all skip the step.
            factor = torch.inf if overflows and place.rank == 0 else 1.0
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "dome left a batch out of the basis")
                scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            same_everywhere(place, flat(model))
            if overflows:
                assert torch.equal(flat(model), before)
                assert scaler.get_scale() < 1024
                break
            torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-9)
        step_after = mine(place, x), mine(place, y)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(step_after[0]), step_after[1])).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(flat(model), before)
        assert flat(model).isfinite().all()
        assert 0 < state.stats.kept_norm < 1


@check
def a_run_goes_on_bit_for_bit_and_with_other_numbers_of_workers(place):
    ways = {
        "per_sample": {"inner": ErrorFeedback(TopK(4.0))},
        "worker": {"samples": "worker", "layout": "layerwise", "rank": 2},
    }
    for name, options in ways.items():
        path = place.shared / f"{name}.pt"
        model, optimizer, state = hooked(**copy.deepcopy(options))
        if path.exists():  # of three workers
            saved = torch.load(path, weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            state.load_state_dict(saved["filter"])
            assert state.stats.step == 4
            for x, y in batches(rng(), 2):
                step(model, optimizer, mine(place, x), mine(place, y))
                same_everywhere(place, flat(model))
            assert state.stats.step == 6
            continue
        data = list(batches(rng(), 8))
        for x, y in data[:4]:
            step(model, optimizer, mine(place, x), mine(place, y))
        saved = copy.deepcopy(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "filter": state.state_dict(),
            }
        )
        assert state.stats.fraction > 0  # of the last step, still
        again, again_optimizer, again_state = hooked(**copy.deepcopy(options))
        again.module.load_state_dict(saved["model"])
        again_optimizer.load_state_dict(saved["optimizer"])
        again_state.load_state_dict(saved["filter"])
        for x, y in data[4:]:
            step(model, optimizer, mine(place, x), mine(place, y))
            step(again, again_optimizer, mine(place, x), mine(place, y))
            if name == "per_sample":  # one message, whatever the buckets are
                assert torch.equal(flat(again), flat(model))
            # DDP's first buckets are others, whose sums are rounded in another order.
            torch.testing.assert_close(flat(again), flat(model), rtol=0, atol=1e-9)
        assert state.state_dict(only=1) == {} or place.rank == 1
        dist.barrier()
        if place.rank == 0:
            torch.save(saved, path)


@check
def one_process_goes_on_from_the_state_of_workers(place):
    model, optimizer, state = hooked(inner=ErrorFeedback(TopK(4.0)))
    for x, y in batches(rng(), 4):
        step(model, optimizer, mine(place, x), mine(place, y))
    saved = state.state_dict()
    alone = small_classifier()
    alone_optimizer = sgd(alone)
    one = dome.attach(alone, alone_optimizer, 4, after=ErrorFeedback(TopK(4.0)))
    one.load_state_dict(saved)
    for x, y in batches(rng(), 2):
        step(alone, alone_optimizer, x, y)
    assert one.stats.step == 6


@check
def after_detach_ddp_sends_what_it_gets(place):
    model, optimizer, state = hooked()
    plain = DistributedDataParallel(small_classifier())
    plain_optimizer = sgd(plain)
    state.detach()
    for x, y in batches(rng(), 3):
        step(model, optimizer, mine(place, x), mine(place, y))
        step(plain, plain_optimizer, mine(place, x), mine(place, y))
    torch.testing.assert_close(flat(model), flat(plain))


@check
def what_does_not_go_together_is_refused_by_name(place):
    make, inner = dome.distributed.HookState, powerSGD_hook.powerSGD_hook
    with pytest.raises(ValueError, match="must be a DistributedDataParallel"):
        make(small_classifier(), 4)
    model = DistributedDataParallel(small_classifier())
    for words, options in {
        "inner must be a communication hook": {"inner": "powerSGD"},
        "inner_state is the state of an inner hook": {"inner_state": 3},
        "a GradScaler lets gradients overflow": {
            "scaler": torch.amp.GradScaler("cpu"),
            "inner": TopK(4.0),
        },
        "goes straight to the inner hook": {"after": TopK(4.0)},
        "direction_rank is not supported in a communication hook": {
            "direction_rank": 2
        },
        "samples must be one of": {"samples": "batch"},
        "stream=True is not supported across workers": {
            "stream": True,
            "layout": "layerwise",
        },
        "workers have different options, strength": {"strength": place.rank / 10},
    }.items():
        with pytest.raises(ValueError, match=words):
            make(model, 4, **options)
    model.register_comm_hook(power_sgd_state(), inner)
    with pytest.raises(ValueError, match=r"HookState\(model, rank, inner=powerSGD_ho"):
        make(model, 4)
    ours, optimizer, _ = hooked()
    with pytest.raises(ValueError, match=r"communication hook 'hook'.*HookState\("):
        dome.distributed.attach(ours, optimizer, 4)
    attached = DistributedDataParallel(small_classifier())
    other = dome.distributed.attach(attached, sgd(attached), 4)
    with pytest.raises(ValueError, match="communication is switched off, by no_sync"):
        make(attached, 4)
    other.detach()


@check
def samples_of_several_backward_passes_are_refused(place):
    model, _, _ = hooked()
    ((x, y),) = batches(rng(), 1)
    with model.no_sync():
        cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="and a communication hook, use samples"):
        cross_entropy(model(x), y).backward()
