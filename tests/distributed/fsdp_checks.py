"""What is checked inside workers of ``fully_shard``. Every function runs on all."""

import copy
import warnings
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import TIGHT, rng, same_everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import dome
import dome.distributed
from dome.trackers.thin import is_thin

CHECKS = {}
PARTS = 12  # micro-batches of a step: 12/P for each worker make the same run for all P


def check(function):
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """Few sizes that workers divide; one layer is called twice.

    The last layer has two rows: the third worker has none of them, as the fourth.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.unused = nn.Linear(2, 3)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        x = self.twice(self.twice(self.first(x).tanh()).tanh())
        return self.last(self.frozen(self.norm(x)).tanh())


def net(dtype=torch.float64, seed=0, kind=Net):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind().to(dtype)
    model.frozen.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    return model


def sharded(place, model, layers=True, **options):
    mesh = init_device_mesh("cpu", (place.size,))
    for layer in model.children() if layers else ():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def start(place, rank=4, model=None, layers=True, policy=None, **options):
    policy = {} if policy is None else {"mp_policy": policy}
    model = sharded(place, net() if model is None else model, layers, **policy)
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    grad_filter = dome.distributed.attach(
        model, optimizer, rank, samples="worker", **options
    )
    return model, optimizer, grad_filter


def start_alone(rank=4, layers=True, **options):
    """One process; layers, which share groups on workers, are as they are."""
    model = net()
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    grad_filter = dome.attach(model, optimizer, rank, samples="microbatch", **options)
    return model, optimizer, grad_filter


def data(num_steps, size=2 * PARTS, dtype=torch.float64):
    generator = rng()
    for _ in range(num_steps):
        x = torch.randn(size, 5, generator=generator, dtype=dtype)
        yield x, torch.randint(2, (size,), generator=generator)


def flat(model):
    """The whole parameters, on every worker."""
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def assert_shares(place, model, one):
    """What this worker has of the parameters is its share of one process's."""
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        shares = [*q.detach().chunk(place.size), *[q[:0].detach()] * place.size]
        torch.testing.assert_close(p.to_local().detach(), shares[place.rank], **TIGHT)


def mine(place, x):
    return x.chunk(place.size)[place.rank]


def step(model, optimizer, x, y, parts=1):
    """A step of several backward passes, each of which reduces gradients."""
    optimizer.zero_grad()
    for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (cross_entropy(model(x_part), y_part) / parts).backward()
    optimizer.step()


def side_by_side(place, num_steps, parts=1, layers=True, **options):
    """Workers and one process with as many micro-batches; both filters.

    Two steps go from one basis to the next; every further one is a hundred messages.
    """
    one = start_alone(**copy.deepcopy(options))
    workers = start(place, layers=layers, **copy.deepcopy(options))
    for x, y in data(num_steps):
        step(*one[:2], x, y, parts * place.size)
        step(*workers[:2], mine(place, x), mine(place, y), parts)
        assert_shares(place, workers[0], one[0])
    return one[2], workers[2]


NAMES = ("kept_norm", "effective_rank", "drift", "step", "bytes_factor")
NAMES += ("noise_scale_inside", "noise_scale_outside")


def assert_alike(one, here, names, options):
    """Numbers and eigenvalues of two filters."""
    for name in names:
        there = getattr(one.stats, name)
        there = pytest.approx(there, rel=1e-6, abs=1e-6, nan_ok=True)
        found = getattr(here.stats, name)
        assert found == there, (options, name, found)
    for name, tracker in one.trackers.items():
        values = here.trackers[name].eigenvalues
        torch.testing.assert_close(values, tracker.eigenvalues, **TIGHT)


@check
def workers_equal_one_process_with_micro_batches(place):
    seldom = {"update_every": 2, "warmup": 1, "strength": 0.7, "generator": rng()}
    for num_steps, options in (
        (3, {}),
        (3, {"layers": False, "tracker": "svd", "rank": 2, "oversample": 1}),
        (3, {"layout": "layerwise", "rank": 3, "forget": 0.2}),
        (4, seldom | {"layers": False}),
    ):
        one, here = side_by_side(place, num_steps, **options)
        assert_alike(one, here, ("fraction", *NAMES), options)
        here.detach()


class Checkpointed(Net):
    """Computes the activations of its middle anew in the backward pass."""

    def forward(self, x):
        x = checkpoint(
            lambda x: self.twice(self.first(x).tanh()), x, use_reentrant=False
        )
        return self.last(self.frozen(self.norm(self.twice(x.tanh()))).tanh())


@check
def activation_checkpointing_leads_where_training_leads_without(place):
    for options in ({}, {"direction_rank": 2}):
        ends = []
        for kind in (Net, Checkpointed):
            workers = start(place, model=net(kind=kind), **options)
            for x, y in data(2):
                step(*workers[:2], mine(place, x), mine(place, y))
            assert workers[2].stats.effective_rank > 1, options
            ends.append(flat(workers[0]))
            workers[2].detach()
        torch.testing.assert_close(*ends, **TIGHT)


@check
def directions_of_low_rank_equal_those_of_one_process(place):
    many = -(-6 // place.size)
    # As many samples as directions: which of those without any lead is chance.
    enough = {"oversample": 2, "forget": 0.3, "parts": many, "layers": False}
    seldom = {"rank": 3, "update_every": 2, "layers": False}
    for num_steps, options in (
        (3, {"direction_rank": 2}),
        (3, {"direction_rank": 1, "rank": 3, "layout": "layerwise"}),
        (3, {"direction_rank": 3, **enough}),
        (4, {"direction_rank": 9, **seldom}),  # nothing is cut
    ):
        one, here = side_by_side(place, num_steps, **options)
        assert_alike(one, here, NAMES, options)
        here.detach()


@check
def large_weights_of_low_rank_are_never_multiplied_out(place):
    with mock.patch.object(dome.trackers.directions, "SMALL_WEIGHT", 0):
        one, here = side_by_side(place, 3, direction_rank=2)
    assert one.stats.effective_rank > 1
    here.detach()


@check
def a_backward_pass_that_reduces_is_a_sample_and_others_add_to_it(place):
    _, here = side_by_side(place, 2, parts=2)
    here.detach()
    # Without synchronisation the passes of a worker are one sample.
    one, workers = start_alone(), start(place)
    for x, y in data(2):
        step(*one[:2], x, y, place.size)
        model, optimizer, _ = workers
        optimizer.zero_grad()
        pieces = zip(mine(place, x).chunk(2), mine(place, y).chunk(2), strict=True)
        for i, (x_part, y_part) in enumerate(pieces):
            model.set_requires_gradient_sync(i == 1)
            (cross_entropy(model(x_part), y_part) / 2).backward()
        optimizer.step()
        assert_shares(place, model, one[0])
    workers[2].detach()


@check
def gradients_that_are_thrown_away_leave_no_samples(place):
    one, (model, optimizer, grad_filter) = start_alone(), start(place)
    batches = list(data(3))
    for i, (x, y) in enumerate(batches):
        step(*one[:2], x, y, place.size)
        optimizer.zero_grad()
        if i % 3:
            cross_entropy(model(2 * mine(place, x)), mine(place, y)).backward()
            optimizer.zero_grad(set_to_none=i % 3 == 1)
        cross_entropy(model(mine(place, x)), mine(place, y)).backward()
        optimizer.step()
        assert_shares(place, model, one[0])
    grad_filter.detach()


@check
def entries_under_a_mask_stay_where_they_are(place):
    for options in ({}, {"direction_rank": 2}, {"update_every": 2}):
        model = net()
        before = [p.detach().clone() for p in trained(model)]
        keep = torch.rand(7, 7, generator=rng()) < 0.5
        model, optimizer, grad_filter = start(place, model=model, **options)
        lines = keep.to(torch.float64).chunk(place.size)
        mask = lines[place.rank] if place.rank < len(lines) else keep[:0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for i, (x, y) in enumerate(data(4)):
                optimizer.zero_grad(set_to_none=i % 2 == 0)
                for x_part, y_part in zip(
                    mine(place, x).chunk(2), mine(place, y).chunk(2), strict=True
                ):
                    cross_entropy(model(x_part), y_part).backward()
                model.twice.weight.grad.to_local().mul_(mask)
                optimizer.step()
        for p, old in zip(trained(model), before, strict=True):
            moved = p.full_tensor() != old
            expected = keep if p is model.twice.weight else torch.ones_like(moved)
            if p is not model.unused.weight and p is not model.unused.bias:
                assert torch.equal(moved, expected), options
        grad_filter.detach()


@check
def parameters_that_the_optimizer_does_not_have_are_left_alone(place):
    one = net()
    some = [*one.twice.parameters(), *one.last.parameters()]
    one_optimizer = sgd_of(some)
    dome.attach(one, one_optimizer, 4, samples="microbatch")
    model = sharded(place, net())
    optimizer = sgd_of([*model.twice.parameters(), *model.last.parameters()])
    grad_filter = dome.distributed.attach(model, optimizer, 4, samples="worker")
    for x, y in data(2):
        step(one, one_optimizer, x, y, place.size)
        step(model, optimizer, mine(place, x), mine(place, y))
        assert_shares(place, model, one)
    grad_filter.detach()


def sgd_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@check
def after_detach_it_is_fully_shard_again(place):
    model, optimizer, grad_filter = start(place)
    plain = sharded(place, net())
    plain_optimizer = sgd_of(trained(plain))
    grad_filter.detach()
    grad_filter.detach()
    for x, y in data(2):
        step(model, optimizer, mine(place, x), mine(place, y))
        step(plain, plain_optimizer, mine(place, x), mine(place, y))
    assert torch.equal(flat(model), flat(plain))


@check
def mixed_precision_samples_are_the_gradients_that_are_sent(place):
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model, optimizer, grad_filter = start(
            place, 2, net(torch.float32), policy=policy, tracker="svd"
        )
        twin = net(torch.float32)
        names = [name for name, p in twin.named_parameters() if p.requires_grad]
        shapes = {name: p.shape for name, p in twin.named_parameters()}
        tracker = dome.IncrementalSVD(sum(shapes[n].numel() for n in names), 2)
        for x, y in data(3, dtype=torch.float32):
            low = copy.deepcopy(twin).bfloat16()
            rows = []
            for x_part, y_part in zip(
                x.chunk(place.size), y.chunk(place.size), strict=True
            ):
                low.zero_grad()
                cross_entropy(low(x_part.bfloat16()), y_part).backward()
                grads = [
                    torch.zeros_like(p) if p.grad is None else p.grad
                    for p in trained(low)
                ]
                rows.append(torch.cat([g.reshape(-1).float() for g in grads]))
            G = torch.stack(rows)
            tracker.update(G)
            mean = G.mean(dim=0).to(reduce_dtype).float()
            expected = tracker.project_out(mean)
            optimizer.zero_grad()
            cross_entropy(model(mine(place, x)), mine(place, y)).backward()
            grad_filter.step()
            got = [
                p.grad.full_tensor() if p.grad is not None else torch.zeros(p.shape)
                for p in trained(model)
            ]
            got = torch.cat([g.reshape(-1) for g in got])
            # Of bfloat16 sums in another order the last of eight bits may differ.
            close = {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(got, expected, **close)
        grad_filter.detach()


def big():
    """33,000 numbers: enough that the small sums of an update weigh little."""
    return nn.Sequential(
        nn.Linear(5, 161), nn.Tanh(), nn.Linear(161, 201), nn.Linear(201, 3)
    )


@check
def a_worker_sends_the_bytes_of_a_reduce_scatter_and_holds_its_share(place):
    model, optimizer, grad_filter = start(place, 4, big().double())
    dim = sum(p.numel() for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    for x, y in data(2):
        step(model, optimizer, mine(place, x), mine(place, y))
    stats = grad_filter.stats
    padded = sum(
        -(-p.shape[0] // place.size) * place.size * (p.numel() // p.shape[0])
        for p in model.parameters()
    )
    assert stats.ddp_bytes == (place.size - 1) * padded * 8 // place.size
    assert stats.sent["samples"] == stats.ddp_bytes
    assert sum(stats.sent.values()) == stats.bytes_sent <= 1.01 * stats.ddp_bytes
    assert stats.share_of_ddp < 1.01
    # d k / P for the basis and d for the rows.
    tracker = grad_filter.trackers["all"]
    assert tracker.basis.shape == (held, 4)
    assert grad_filter._source._buffer.shape == (place.size, held)
    assert place.size * held <= padded
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert int(total) == dim
    grad_filter.detach()


@check
def directions_of_low_rank_send_their_right_factors_besides(place):
    K, r = 3, 2
    sizes = (5, 61, 81, 61, 3)
    net = nn.Sequential(*(nn.Linear(m, n) for m, n in pairwise(sizes)))
    model, optimizer, grad_filter = start(place, K, net.double(), direction_rank=r)
    for x, y in data(4):
        step(model, optimizer, mine(place, x), mine(place, y))
    dim = sum(p.numel() for p in model.parameters())
    weights = [p for p in model.parameters() if is_thin(p.shape, r, dim)]
    assert len(weights) == 2  # the others are small beside them
    right = K * r * sum(p.shape[1] for p in weights)
    # Coordinates of P samples; a Gram matrix for every direction of every weight; three
    # k × k matrices; Uᵀg; two norms and a count.
    small = place.size * K + len(weights) * K * r * r + 3 * K * K + K + 3
    stats = grad_filter.stats
    assert stats.sent["samples"] == stats.ddp_bytes
    most = 2 * (place.size - 1) / place.size * 8 * (right + small)
    assert stats.sent["sums"] <= most + 8 * place.size, (stats.sent, most)
    state = grad_filter.trackers["all"].state_dict()
    for i, p in enumerate(weights):
        assert state[f"left_{i}"].shape == (len(p.to_local()), K * r)
        assert state[f"right_{i}"].shape == (p.shape[1], K * r)
    grad_filter.detach()


RUNS = {
    "power": {"rank": 4},
    "layers": {"rank": 3, "layout": "layerwise", "layers": False},
    "low rank": {"rank": 4, "direction_rank": 2, "layers": False},
}
BEGIN, END = 2, 3


def go_on(place, model, optimizer, batches):
    """Steps of twelve micro-batches, however many workers there are."""
    for x, y in batches:
        step(model, optimizer, mine(place, x), mine(place, y), PARTS // place.size)


def everything(model, optimizer, grad_filter):
    momentum = {
        str(i): optimizer.state[p]["momentum_buffer"]
        for i, p in enumerate(trained(model))
        if "momentum_buffer" in optimizer.state[p]
    }
    return {
        "model": model.state_dict(),
        "momentum": momentum,
        "filter": grad_filter,  # dcp asks for its state, and gives it back
    }


def resume(place, path, **options):
    """A run as it was saved, by a number of workers that need not be this one."""
    model, optimizer, grad_filter = start(place, model=net(seed=7), **options)
    x, y = next(data(1))
    cross_entropy(model(mine(place, x)), mine(place, y)).backward()
    optimizer.step()  # so that there is a momentum to be loaded into
    state = everything(model, optimizer, grad_filter)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return model, optimizer, grad_filter


@check
def a_checkpoint_goes_on_with_another_number_of_workers(place):
    batches = list(data(END))
    for name, options in RUNS.items():
        one = start_alone(**options)
        for x, y in batches:
            step(*one[:2], x, y, PARTS)
        path, end = place.shared / name, place.shared / f"{name}.end.pt"
        if place.size == 3:
            run = start(place, **options)
            go_on(place, *run[:2], batches[:BEGIN])
            dcp.save(everything(*run), checkpoint_id=path)
            go_on(place, *run[:2], batches[BEGIN:])
            whole = flat(run[0])
            if place.rank == 0:
                torch.save(whole, end)
            run[2].detach()
            dist.barrier()
        model, optimizer, grad_filter = resume(place, path, **options)
        assert grad_filter._num_steps == BEGIN
        go_on(place, model, optimizer, batches[BEGIN:])
        assert grad_filter.stats.step == END
        torch.testing.assert_close(flat(model), flat(one[0]), **TIGHT)
        if place.size == 3:
            assert torch.equal(flat(model), torch.load(end, weights_only=True)), name
        grad_filter.detach()


@check
def a_whole_state_goes_on_in_one_process_and_back(place):
    for options in RUNS.values():
        model, optimizer, grad_filter = start(place, **options)
        batches = list(data(3))
        go_on(place, model, optimizer, batches[:2])
        state, last = grad_filter.full_state_dict(), place.size - 1
        alone = grad_filter.full_state_dict(only=last)
        assert alone.keys() == (state.keys() if place.rank == last else set())
        for value in state.values():
            if value.is_floating_point():
                same_everywhere(place, value)
        one, one_optimizer, one_filter = start_alone(**options)
        one_filter.load_state_dict(state)
        again = one_filter.state_dict()
        assert all(torch.equal(again[name], value) for name, value in state.items())
        # The other way, to these workers.
        for x, y in batches[2:]:
            step(one, one_optimizer, x, y, PARTS)
        grad_filter.load_state_dict(one_filter.state_dict())
        back = grad_filter.full_state_dict()
        for name, value in one_filter.state_dict().items():
            assert torch.equal(back[name], value), name
        grad_filter.detach()


@check
def a_layer_of_one_thin_weight_gets_its_state_back(place):
    options = {"direction_rank": 1, "rank": 3, "layout": "layerwise"}
    model, optimizer, grad_filter = start(place, **options)
    for x, y in data(2):
        step(model, optimizer, mine(place, x), mine(place, y))
    assert len(grad_filter.trackers["first"].state_dict()["plain"]) == 0
    whole = grad_filter.full_state_dict()
    grad_filter.load_state_dict(grad_filter.state_dict())
    again = grad_filter.full_state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    with pytest.raises(ValueError, match="call full_state_dict"):
        grad_filter.state_dict(only=0)
    grad_filter.detach()


@check
def what_fully_shard_cannot_capture_is_refused_by_name(place):
    _, _, grad_filter = start(place)
    x, _ = next(data(1))
    for name, given in (("watch", [x]), ("paused", []), ("expect_backward", [x.sum()])):
        with pytest.raises(RuntimeError, match="no call of the model is captured"):
            getattr(grad_filter, name)(*given)
    grad_filter.detach()


@check
def a_state_of_another_model_or_rank_is_refused(place):
    _, _, grad_filter = start(place)
    state = grad_filter.state_dict()
    grad_filter.detach()
    _, _, other = start(place, 5)
    with pytest.raises(ValueError, match="tracks 4 directions"):
        other.load_state_dict(state)
    other.detach()
    _, _, thin = start(place, direction_rank=2)
    with pytest.raises(ValueError, match="use the same layout and rank"):
        thin.load_state_dict(state)
    thin.detach()


@check
def workers_at_different_steps_are_told_apart(place):
    _, _, grad_filter = start(place)
    grad_filter._num_steps = 5 if place.rank else 4
    with pytest.raises(RuntimeError, match=r"different steps, rank by rank \[4, 5"):
        grad_filter.step()
    grad_filter.detach()


@check
def what_changes_under_the_filter_is_an_error(place):
    x, y = next(data(1))
    model, optimizer, grad_filter = start(place)
    model.last.set_gradient_divide_factor(2.0)
    with pytest.raises(RuntimeError, match="set_gradient_divide_factor was called"):
        step(model, optimizer, mine(place, x), mine(place, y))
    grad_filter.detach()
    model, optimizer, grad_filter = start(place)
    model.first.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="attach again after freezing"):
        step(model, optimizer, mine(place, x), mine(place, y))
    grad_filter.detach()
    model, optimizer, grad_filter = start(place)
    for p in trained(model):
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="reduced without the filter"):
        optimizer.step()
    grad_filter.detach()
