"""What is checked inside worker processes. Every function runs on every worker."""

import contextlib
import copy
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from compressors import COMPRESSORS
from models import batches, small_classifier
from reference import largest_angle
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dome
import dome.distributed
from dome.compression import (
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    RandomK,
    TopK,
)
from dome.compression.message import FRONT_BYTES
from dome.reference import per_sample_loop
from dome.samples.store import group

CHECKS = {}
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


@dataclass(frozen=True)
class Place:
    """Which worker this is, and a folder that outlives it."""

    rank: int
    size: int
    shared: Path


def check(function):
    CHECKS[function.__name__] = function
    return function


def rng():
    return torch.Generator().manual_seed(1234)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def flat_grad(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mine(place, x, sizes=None):
    """This worker's part of a batch: equal ones, or of these sizes."""
    return x.split(sizes or len(x) // place.size)[place.rank]


def start(place, rank, model=None, ddp=None, **options):
    """A DDP model with a filter, its optimizer and the filter."""
    model = DistributedDataParallel(model or small_classifier(), **(ddp or {}))
    optimizer = sgd(model)
    grad_filter = dome.distributed.attach(model, optimizer, rank, **options)
    return model, optimizer, grad_filter


def same_everywhere(place, tensor):
    """Whether all workers hold the same bits."""
    others = [torch.empty_like(tensor) for _ in range(place.size)]
    dist.all_gather(others, tensor.contiguous())
    assert all(torch.equal(tensor, other) for other in others)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def compare_with_one_process(place, num_steps, size=12, dtype=torch.float64, **options):
    """Both kinds of run side by side; the largest difference of parameters."""
    options = {"rank": 6} | options
    one = small_classifier(dtype)
    one_optimizer = sgd(one)
    # Both filters draw their seed: from generators in the same state, not from one.
    one_filter = dome.attach(one, one_optimizer, **copy.deepcopy(options))
    model, optimizer, grad_filter = start(
        place, model=small_classifier(dtype), **copy.deepcopy(options)
    )
    worst = 0.0
    for x, y in batches(rng(), num_steps, size, dtype):
        step(one, one_optimizer, x, y)
        step(model, optimizer, mine(place, x), mine(place, y))
        worst = max(worst, float((flat(one) - flat(model)).abs().max()))
        same_everywhere(place, flat(model))
    names = STATS if "direction_rank" in options else ("fraction", *STATS)
    assert_same_stats(one_filter.stats, grad_filter.stats, dtype, names)
    grad_filter.detach()
    return worst


# The fraction is of a worker's own samples with directions of low rank.
STATS = ("step", "kept_norm", "effective_rank", "drift", "bytes_factor")
STATS += ("noise_scale_inside", "noise_scale_outside")


def assert_same_stats(one, other, dtype, names):
    tolerance = {"rel": 1e-6 if dtype == torch.float64 else 1e-2, "abs": 1e-5}
    # Noise scales of the blocks that a dictionary of ranks leaves in, or too few steps.
    tolerance["nan_ok"] = True
    for name in names:
        there, here = getattr(one, name), getattr(other, name)
        assert here == pytest.approx(there, **tolerance), (name, there, here)


@check
def per_sample_equals_one_process_with_the_whole_batch(place):
    assert compare_with_one_process(place, 24) < 1e-9


def text_batches(num, size):
    random = rng()
    for _ in range(num):
        some = torch.randperm(40, generator=random)[:12]
        picks = torch.randint(12, (size, 4), generator=random)
        yield some[picks], torch.randint(3, (size,), generator=random)


def reader():
    torch.manual_seed(0)
    words = nn.EmbeddingBag(40, 5)
    return nn.Sequential(words, nn.Tanh(), nn.Linear(5, 3)).double()


@check
def words_of_large_embeddings_equal_one_process_that_keeps_them_all(place):
    large, bytes_sent = group.LARGE, []
    for options in (
        {},
        {"layout": "layerwise"},
        {"tracker": "svd"},
        {"update_every": 2},
        {"samples": "worker"},
    ):
        group.LARGE = 1 << 60
        one = reader()
        one_optimizer = sgd(one)
        kinds = {"samples": "microbatch"} if "samples" in options else options
        dome.attach(one, one_optimizer, 2, **kinds)
        group.LARGE = 1
        model, optimizer, grad_filter = start(place, 2, model=reader(), **options)
        for x, y in text_batches(5, 12):
            step(model, optimizer, mine(place, x), mine(place, y))
            one_optimizer.zero_grad()
            parts = place.size if "samples" in options else 1
            for some, classes in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (cross_entropy(one(some), classes) / parts).backward()
            one_optimizer.step()
            torch.testing.assert_close(flat(model), flat(one), rtol=1e-11, atol=1e-11)
        bytes_sent.append(grad_filter.stats.bytes_sent)
    # A third of the words travels for each of four samples, and a flag for each word.
    group.LARGE = 1 << 60
    model, optimizer, grad_filter = start(place, 2, model=reader())
    ((x, y),) = text_batches(1, 12)
    step(model, optimizer, mine(place, x), mine(place, y))
    assert bytes_sent[0] < 0.7 * grad_filter.stats.bytes_sent
    group.LARGE = large


class Checkpointed(nn.Module):
    """A model that keeps no activations of its first layers, but computes them anew."""

    def __init__(self):
        super().__init__()
        self.inner = small_classifier()

    def forward(self, x):
        *front, last = self.inner
        return last(checkpoint(nn.Sequential(*front), x, use_reentrant=False))


@check
def activation_checkpointing_leads_where_training_leads_without(place):
    for options in (
        {},
        {"samples": "worker"},
        {"direction_rank": 2},
        {"compressor": TopK(4.0)},
    ):
        ends = []
        for build in (small_classifier, Checkpointed):
            model, optimizer, grad_filter = start(
                place, 3, model=build(), **copy.deepcopy(options)
            )
            for x, y in batches(rng(), 2):
                step(model, optimizer, mine(place, x), mine(place, y))
            assert grad_filter.stats.effective_rank > 1, options
            ends.append(flat(model))
            grad_filter.detach()
        torch.testing.assert_close(*ends, **TIGHT)


@check
def a_worker_holds_its_rows_of_the_basis_and_no_others(place):
    _, _, grad_filter = start(place, 6)
    length = -(-195 // place.size)
    held = grad_filter.trackers["all"].basis
    assert held.shape == (min(length, 195 - place.rank * length), 6)
    grad_filter.detach()


@check
def per_sample_equals_one_process_with_every_option(place):
    for num_steps, options in (
        (4, {"tracker": "svd", "rank": 15}),
        (4, {"rank": 30, "oversample": 5}),
        (4, {"layout": "layerwise", "rank": 7}),
        (4, {"layout": "layerwise", "rank": {"2": 7}, "tracker": "svd"}),
        (6, {"update_every": 3, "warmup": 2, "forget": 0.2, "strength": 0.7}),
        (4, {"after": lambda g: 0.5 * g, "generator": rng()}),
    ):
        assert compare_with_one_process(place, num_steps, **options) < 1e-9, options


@check
def more_samples_than_directions_give_the_same(place):
    assert compare_with_one_process(place, 20, size=60, rank=3) < 1e-9


@check
def directions_of_low_rank_equal_one_process_with_the_whole_batch(place):
    for more in (
        {},
        {"layout": "layerwise", "forget": 0.2},
        {"update_every": 2},
        {"direction_rank": 50},  # larger than every weight: none is thin
    ):
        options = {"direction_rank": 2, "rank": 3} | more
        assert compare_with_one_process(place, 4, **options) < 1e-9
    # Where a weight is not small, samples are products.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dome.samples.store.factors.SMALL_WEIGHT", 0)
        assert compare_with_one_process(place, 4, direction_rank=2, rank=3) < 1e-9
    model, optimizer, grad_filter = start(place, 3, direction_rank=2)
    for i, (x, y) in enumerate(batches(rng(), 4, 12)):
        if i == 2 and place.rank == 0:  # a worker without samples
            optimizer.zero_grad()
            optimizer.step()
        else:
            step(model, optimizer, mine(place, x), mine(place, y))
        same_everywhere(place, flat(model))
    state = grad_filter.state_dict()
    grad_filter.load_state_dict(state)
    assert grad_filter.state_dict().keys() == state.keys()
    grad_filter.detach()


class Words(nn.Module):
    """An embedding, of whose words a worker sees a few in a batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(dim=1))


def word_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Words().double()
    keep = torch.ones(30, 4, dtype=torch.float64)
    keep[:15] = 0  # frozen words
    keep[20, 1] = 0  # and one number
    model.embedding.weight.register_hook(lambda g: g * keep)
    return model, keep == 0


MASKED = {
    "plain": {},
    "layer-wise": {"layout": "layerwise"},
    "now and then": {"update_every": 2, "warmup": 1},
    "low rank": {"direction_rank": 2},
    "one direction": {"rank": 1},
    "workers": {"samples": "worker"},
    "workers, low rank": {"samples": "worker", "direction_rank": 2},
}


def step_in_parts(place, model, optimizer, x, y):
    """A step of one process, for which a worker's batch is a micro-batch."""
    optimizer.zero_grad()
    for x_part, y_part in zip(x.chunk(place.size), y.chunk(place.size), strict=True):
        (cross_entropy(model(x_part), y_part) / place.size).backward()
    optimizer.step()


@check
def entries_under_a_mask_stay_where_they_are(place):
    generator = rng()
    size = 8 * place.size
    data = [
        (torch.randint(30, (size, 3), generator=generator), torch.arange(size) % 3)
        for _ in range(7)
    ]
    for name, more in MASKED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run_masked(place, data, name, {"rank": 3} | more)


def run_masked(place, data, name, options):
    bare, frozen = word_model()
    model = DistributedDataParallel(bare)
    # Momentum would go on moving what moved before a sample had it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.distributed.attach(model, optimizer, **options)
    one, _ = word_model()
    one_optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    if options.get("samples") == "worker":
        options["samples"] = "microbatch"
    one_filter = dome.attach(one, one_optimizer, **options)
    seen = torch.zeros(30, dtype=torch.bool)
    for x, y in data:
        before = bare.embedding.weight.detach().clone()
        step(model, optimizer, mine(place, x), mine(place, y))
        step_in_parts(place, one, one_optimizer, x, y)
        seen[x.unique()] = True
        after = bare.embedding.weight.detach()
        held = frozen & seen[:, None]
        assert torch.equal(after[held], before[held]), name
        same_everywhere(place, flat(model))
    assert (after != before)[~frozen].any(), name
    torch.testing.assert_close(flat(model), flat(one), **TIGHT, msg=name)
    state = grad_filter.state_dict()
    assert torch.equal(state["held"], one_filter.state_dict()["held"]), name
    grad_filter.load_state_dict(state)
    assert torch.equal(grad_filter.state_dict()["held"], state["held"]), name
    grad_filter.detach()


@check
def masks_are_told_to_others_once(place):
    model, optimizer, grad_filter = start(place, 3, model=word_model()[0])
    x, y = torch.arange(30).view(10, 3), torch.arange(10) % 3
    sent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            step(model, optimizer, x, y)
            sent.append(grad_filter.stats.sent["control"])
    grad_filter.detach()
    assert sent[0] > sent[1] == sent[2]


@check
def float32_stays_within_rounding(place):
    # 24 samples determine 4 directions: nothing arbitrary is left to differ.
    worst = compare_with_one_process(place, 20, 24, torch.float32, rank=4)
    assert worst < 1e-4


@check
def the_subspace_does_not_depend_on_the_size_of_gradients(place):
    for size in (12, 60):
        for factor in (1e-18, 1.0, 1e18):
            one, other = (small_classifier(torch.float32) for _ in range(2))
            one_filter = dome.GradientFilter(one, 2)
            model, _, grad_filter = start(place, 2, model=other)
            for x, y in batches(rng(), 4, size, torch.float32):
                for net, part, filtered in (
                    (one, slice(None), one_filter),
                    (model, slice(place.rank, None, place.size), grad_filter),
                ):
                    net.zero_grad()
                    cross_entropy(net(x[part]), y[part]).mul(factor).backward()
                    filtered.step()
            basis = grad_filter.state_dict()["blocks.all.basis"]
            Q = grad_filter.state_dict()["blocks.all.Q"]
            basis = basis.double() @ Q if len(Q) else basis.double()
            expected = one_filter.trackers["all"].basis.double()
            assert largest_angle(expected, basis) < 1e-3, (size, factor)
            assert grad_filter.stats.skipped_updates == 0
            grad_filter.detach()


@check
def local_gradients_as_samples_equal_one_process_with_microbatches(place):
    for parts in (1, 2):
        one = small_classifier()
        one_optimizer = sgd(one)
        dome.attach(one, one_optimizer, 6, samples="microbatch")
        model, optimizer, grad_filter = start(place, 6, samples="worker")
        for x, y in batches(rng(), 4):
            one_optimizer.zero_grad()
            pieces = len(x) // (place.size * parts)
            for x_part, y_part in zip(x.split(pieces), y.split(pieces), strict=True):
                loss = cross_entropy(one(x_part), y_part) / (place.size * parts)
                loss.backward()
            one_optimizer.step()
            accumulate(model, optimizer, mine(place, x), mine(place, y), parts)
            torch.testing.assert_close(flat(model), flat(one), **TIGHT)
        grad_filter.detach()


def accumulate(model, optimizer, x, y, parts):
    """A step of several backward passes, all but the last without synchronisation."""
    optimizer.zero_grad()
    pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
    for i, (x_part, y_part) in enumerate(pieces):
        last = i == len(pieces) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (cross_entropy(model(x_part), y_part) / parts).backward()
    optimizer.step()


@check
def accumulation_with_no_sync_equals_the_whole_batch(place):
    for ddp in ({}, {"gradient_as_bucket_view": True}):
        one = small_classifier()
        one_optimizer = sgd(one)
        dome.attach(one, one_optimizer, 6)
        model, optimizer, grad_filter = start(place, 6, ddp=ddp)
        for x, y in batches(rng(), 4):
            step(one, one_optimizer, x, y)
            accumulate(model, optimizer, mine(place, x), mine(place, y), 2)
            torch.testing.assert_close(flat(model), flat(one), **TIGHT)
        grad_filter.detach()


def literal(model, tracker, parts):
    """The filtered gradient of parts [(x, y)] from one backward pass a sample."""
    rows = [per_sample_loop(model, cross_entropy, x, y) for x, y in parts if len(x)]
    tracker.update(torch.cat(rows))
    # DDP's average: every worker counts the same, however many samples it has.
    return tracker.project_out(sum(G.mean(dim=0) for G in rows) / len(parts))


UNEVEN = {
    2: [[7, 5], [12, 0], [1, 11], [6, 6]],
    3: [[6, 4, 2], [9, 3, 0], [0, 12, 0], [4, 4, 4]],
}


def check_uneven(place, rank, factor):
    model, optimizer, grad_filter = start(place, rank)
    tracker = dome.StreamingPower(195, rank, dtype=torch.float64)
    data = batches(rng(), 4, size=12 * factor)
    for (x, y), sizes in zip(data, UNEVEN[place.size], strict=True):
        num = [factor * size for size in sizes]
        parts = list(zip(x.split(num), y.split(num), strict=True))
        expected = literal(copy.deepcopy(model.module), tracker, parts)
        optimizer.zero_grad()
        own_x, own_y = parts[place.rank]
        if len(own_x):
            cross_entropy(model(own_x), own_y).backward()
        optimizer.step()
        torch.testing.assert_close(flat_grad(model), expected, **TIGHT)
        same_everywhere(place, flat(model))
    grad_filter.detach()


@check
def uneven_batches_and_workers_without_samples_weigh_as_in_ddp(place):
    check_uneven(place, rank=6, factor=1)
    check_uneven(place, rank=1, factor=3)


@check
def local_gradients_of_uneven_micro_batches_weigh_as_in_ddp(place):
    model, optimizer, grad_filter = start(place, 5, samples="worker")
    tracker = dome.StreamingPower(195, 5, dtype=torch.float64)
    num_parts = [2, 1, 0][: place.size]  # of each worker
    for x, y in batches(rng(), 3):
        twin, rows, pieces = copy.deepcopy(model.module), [], list(x.split(4))
        for worker, num in enumerate(num_parts):
            first = sum(num_parts[:worker])
            rows += [
                per_sample_loop(twin, cross_entropy, pieces[i], y.split(4)[i]).mean(
                    dim=0
                )
                for i in range(first, first + num)
            ]
        tracker.update(torch.stack(rows))
        average = sum(row / num for row, num in zip(rows, (2, 2, 1), strict=True))
        expected = tracker.project_out(average / place.size)
        optimizer.zero_grad()
        first = sum(num_parts[: place.rank])
        for i in range(first, first + num_parts[place.rank]):
            loss = cross_entropy(model(pieces[i]), y.split(4)[i])
            (loss / num_parts[place.rank]).backward()
        optimizer.step()
        torch.testing.assert_close(flat_grad(model), expected, **TIGHT)
        same_everywhere(place, flat(model))
    grad_filter.detach()


@check
def an_empty_batch_counts_as_no_samples(place):
    model, optimizer, grad_filter = start(place, 6)
    tracker = dome.StreamingPower(195, 6, dtype=torch.float64)
    sizes = [6, 0] if place.size == 2 else [4, 2, 0]
    for x, y in batches(rng(), 2, size=6):
        parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
        expected = literal(copy.deepcopy(model.module), tracker, parts)
        own_x, own_y = parts[place.rank]
        optimizer.zero_grad()
        loss = cross_entropy(model(own_x), own_y, reduction="sum")
        (loss / max(1, len(own_x))).backward()
        optimizer.step()
        torch.testing.assert_close(flat_grad(model), expected, **TIGHT)
    grad_filter.detach()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = (
            nn.Linear(8, 6),
            nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)]),
        )
        self.double()
        self.head = 0

    def forward(self, x):
        return self.heads[self.head](self.body(x).tanh())


@check
def a_parameter_unused_on_one_worker_gets_the_gradient_of_the_others(place):
    ddp = {"find_unused_parameters": True}
    for samples in ("per_sample", "worker"):
        module = TwoHeads()
        module.head = min(place.rank, 1)  # the third head is used by nobody
        model, optimizer, grad_filter = start(
            place, 5, model=module, ddp=ddp, samples=samples
        )
        dim = sum(p.numel() for p in module.parameters())
        tracker = dome.StreamingPower(dim, 5, dtype=torch.float64)
        for x, y in batches(rng(), 3):
            rows = []
            for worker in range(place.size):
                twin = copy.deepcopy(module)
                twin.head = min(worker, 1)
                there = Place(worker, place.size, place.shared)
                rows.append(
                    per_sample_loop(twin, cross_entropy, mine(there, x), mine(there, y))
                )
            means = torch.stack([G.mean(dim=0) for G in rows])
            tracker.update(torch.cat(rows) if samples == "per_sample" else means)
            expected = tracker.project_out(means.mean(dim=0))
            step(model, optimizer, mine(place, x), mine(place, y))
            unused = list(module.heads[2].parameters())
            assert all(p.grad is None for p in unused)
            got = [
                torch.zeros_like(p) if p.grad is None else p.grad
                for p in module.parameters()
            ]
            used = dim - sum(p.numel() for p in unused)
            got = torch.cat([g.reshape(-1) for g in got])
            torch.testing.assert_close(got[:used], expected[:used], **TIGHT)
            same_everywhere(place, flat(model))
        grad_filter.detach()


@check
def empty_shards_hold_nothing_and_change_nothing(place):
    for samples in ("per_sample", "worker"):
        for width in (1, 2):
            one = nn.Linear(width, 1, bias=False).double()
            dist.broadcast(one.weight.data, 0)
            model, optimizer, grad_filter = start(
                place, 1, model=copy.deepcopy(one), samples=samples
            )
            kind = "per_sample" if samples == "per_sample" else "microbatch"
            one_optimizer = sgd(one)
            dome.attach(one, one_optimizer, 1, samples=kind)
            data = rng()
            for _ in range(4):
                x = torch.randn(6, width, generator=data, dtype=torch.float64)
                pieces = [x] if kind == "per_sample" else x.chunk(place.size)
                one_optimizer.zero_grad()
                for piece in pieces:
                    (one(piece).square().mean() / len(pieces)).backward()
                one_optimizer.step()
                optimizer.zero_grad()
                model(mine(place, x)).square().mean().backward()
                optimizer.step()
                torch.testing.assert_close(model.module.weight, one.weight, **TIGHT)
            whole = grad_filter.state_dict()["blocks.all.basis"]
            assert whole.shape == (width, 1)
            grad_filter.detach()


@check
def a_gradient_changed_before_the_step_is_what_is_averaged(place):
    model, optimizer, grad_filter = start(place, 6)
    one = small_classifier()
    one_filter = dome.GradientFilter(one, 6)
    (x, y), *_ = batches(rng(), 1)
    cross_entropy(one(x), y).backward()
    one_filter.step()
    cross_entropy(model(mine(place, x)), mine(place, y)).backward()
    for p in model.parameters():
        p.grad *= 0.5
    optimizer.step()
    torch.testing.assert_close(flat_grad(model), 0.5 * flat_grad(one), **TIGHT)
    grad_filter.detach()


@check
def values_that_are_not_finite_stay_where_they_are_and_out_of_the_basis(place):
    model, optimizer, grad_filter = start(place, 6)
    data = list(batches(rng(), 2))
    step(model, optimizer, mine(place, data[0][0]), mine(place, data[0][1]))
    optimizer.zero_grad()
    cross_entropy(model(mine(place, data[1][0])), mine(place, data[1][1])).backward()
    if place.rank == 0:
        model.module[0].bias.grad[3] = float("nan")
    grad_filter.step()
    assert grad_filter.stats.kept_norm == 1
    bad = flat_grad(model).isnan()
    assert int(bad.sum()) == 1
    grad_filter.detach()


EXPENSIVE = {  # options; how many steps until it is told; a word of the way out
    "samples": ({}, 1, 'samples="worker"'),
    "samples, whatever comes after": ({"after": lambda g: g}, 1, "after=..."),
    "samples of some steps": ({"update_every": 2}, 2, "update_every=n"),
    "samples of few steps": ({"update_every": 20}, 20, None),
    "gradients of workers": ({"samples": "worker"}, 1, None),
    "bases": ({"compressor": HadamardSketch(100), "share": 2}, 3, "share="),
    "messages": ({"compressor": HadamardSketch(100)}, 1, None),
}


@check
def what_costs_more_than_twice_ddp_is_told_once_by_the_first_worker(place):
    for name, (options, num_steps, way) in EXPENSIVE.items():
        model = DistributedDataParallel(wide_classifier(100))
        optimizer = sgd(model)
        grad_filter = dome.distributed.attach(model, optimizer, 9, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sent = plain = 0
            for x, y in batches(rng(), num_steps + 1, size=24):
                assert len(told) <= (sent > 0), name
                step(model, optimizer, mine(place, x), mine(place, y))
                stats = grad_filter.stats
                if stats.step <= num_steps:
                    sent, plain = sent + stats.bytes_sent, plain + stats.ddp_bytes
        if place.rank or place.size == 1 or way is None:
            assert not told, name
        else:
            (words,) = (str(warning.message) for warning in told)
            assert f" {sent / plain:.1f} times the bytes of DDP" in words, name
            assert way in words, name
        grad_filter.detach()


@check
def local_gradients_cost_the_traffic_of_ddp_and_little_more(place):
    model, optimizer, grad_filter = start(place, 6, samples="worker")
    num_steps = 5
    for x, y in batches(rng(), num_steps):
        step(model, optimizer, mine(place, x), mine(place, y))
    stats, P, K = grad_filter.stats, place.size, 6
    assert (stats.worker, stats.num_workers) == (place.rank, P)
    assert stats.ddp_bytes == -(-2 * (P - 1) * 195 * 8 // P)
    moved = stats.sent["samples"] + stats.sent["gradient"]
    # Shards are filled up to equal lengths.
    assert moved <= stats.ddp_bytes + 2 * (P - 1) * 8 * P
    assert stats.sent["basis"] == stats.sent["messages"] == 0
    assert 0 < stats.sent["sums"] <= 2 * 8 * (4 * K * K + P * K + P * P + 4)
    assert stats.bytes_sent == sum(stats.sent.values())
    assert stats.total_ddp_bytes == num_steps * stats.ddp_bytes
    assert stats.total_bytes_sent >= num_steps * moved
    grad_filter.detach()


def wide_classifier(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)).double()


def overheads(place, width, **options):
    """What each of 20 steps sends beyond DDP's all-reduce."""
    model, optimizer, grad_filter = start(
        place, 6, model=wide_classifier(width), **options
    )
    sent = []
    for x, y in batches(rng(), 20):
        step(model, optimizer, mine(place, x), mine(place, y))
        sent.append(grad_filter.stats.bytes_sent - grad_filter.stats.ddp_bytes)
    grad_filter.detach()
    return sent


@check
def what_local_gradients_cost_beyond_ddp_does_not_grow_with_the_model(place):
    P, K = place.size, 6
    small, large = (overheads(place, n, samples="worker") for n in (16, 240))
    # Shards are filled up to equal lengths: less than P numbers, there and back.
    filled = 2 * 8 * P
    assert abs(median(large) - median(small)) <= filled
    # In float64: H U and H Hᵀ of P samples; 2 for norms. Four integers for flags.
    usual = 2 * 8 * (P * K + P * P + P + 2) + 8 * P * 4
    assert median(large) <= filled + usual
    # Now and then UᵀU is measured, and mended in a few sweeps.
    assert max(small + large) <= filled + usual + 2 * 8 * (P * K + 4 * K * K)


@check
def exact_samples_are_sent_once_and_bring_the_gradient_with_them(place):
    P, D, number = place.size, 195, 8
    length = -(-D // P)
    held = len(range(*slice(place.rank * length, (place.rank + 1) * length).indices(D)))
    for rank, size in ((6, 12), (2, 60)):
        model, optimizer, grad_filter = start(place, rank)
        for x, y in batches(rng(), 3, size=size):
            step(model, optimizer, mine(place, x), mine(place, y))
        sent = grad_filter.stats.sent
        assert sent["samples"] == size // P * (D - held) * number, (rank, size)
        assert sent["gradient"] == (P - 1) * length * number
        grad_filter.detach()


@check
def what_needs_the_whole_basis_is_refused_by_name(place):
    for options in ({}, {"direction_rank": 2}, {"compressor": TopK(4.0)}):
        model, optimizer, grad_filter = start(place, 3, **options)
        (x, y), *_ = batches(rng(), 1)
        step(model, optimizer, mine(place, x), mine(place, y))
        G = torch.ones(4, 195, dtype=torch.float64)
        for name, given in (("observe", [G]), ("project_out", [G]), ("filter_", [])):
            with pytest.raises(RuntimeError, match="works in one process only"):
                getattr(grad_filter, name)(*given)
        grad_filter.detach()


@check
def what_is_watched_is_captured_as_in_one_process(place):
    one, other = small_classifier(), small_classifier()
    optimizer = sgd(one)
    one_filter = dome.attach(one, optimizer, 3)
    model, its_optimizer, grad_filter = start(place, 3, model=other)
    for x, y in batches(rng(), 3):
        for net, sgd_of, filtered, part in (
            (one, optimizer, one_filter, slice(None)),
            (other, its_optimizer, grad_filter, slice(place.rank, None, place.size)),
        ):
            sgd_of.zero_grad()
            own = x[part]
            with filtered.watch(own):
                out = net[2:](net[:2](own))
            cross_entropy(out, y[part]).backward()
            sgd_of.step()
        torch.testing.assert_close(flat(model), flat(one), **TIGHT)
    grad_filter.detach()


@check
def stats_are_those_of_the_last_step_after_a_state_too(place):
    for options in ({}, {"direction_rank": 2}, {"compressor": TopK(4.0)}):
        model, optimizer, grad_filter = start(place, 3, **options)
        for x, y in batches(rng(), 2):
            step(model, optimizer, mine(place, x), mine(place, y))
        before = grad_filter.stats
        assert grad_filter.full_state_dict().keys() == grad_filter.state_dict().keys()
        after = grad_filter.stats
        for name in ("step", "kept_norm", "drift", "effective_rank", "seconds"):
            assert getattr(after, name) == getattr(before, name), name
        assert after.total_bytes_sent >= before.total_bytes_sent
        grad_filter.detach()


@check
def the_plan_predicts_the_bytes(place):
    P, dim = place.size, 2883
    for rank, size, options, name in (
        (6, 12, {"samples": "worker"}, 'samples="worker"'),
        (6, 12, {}, 'samples="per_sample"'),
        (2, 60, {}, 'samples="per_sample"'),
        (6, 12, {"compressor": HadamardSketch(10)}, "HadamardSketch(10)"),
    ):
        model, optimizer, grad_filter = start(
            place, rank, model=wide_classifier(240).float(), **options
        )
        for x, y in batches(rng(), 4, size, torch.float32):
            step(model, optimizer, mine(place, x), mine(place, y))
        plan = dome.plan_workers(dim, rank, size // P, P, rate=10)
        (choice,) = (choice for choice in plan.choices if choice.name == name)
        stats = grad_filter.stats
        assert stats.ddp_bytes == pytest.approx(plan.ddp_bytes, abs=1)
        # Beside it: shards filled up to equal lengths, flags, and a few sums of norms.
        close = pytest.approx(choice.bytes_sent, rel=0.01, abs=400)
        assert stats.bytes_sent == close, (name, size, stats.sent)
        grad_filter.detach()


@check
def buffers_follow_the_first_worker_as_in_ddp(place):
    def with_norm():
        torch.manual_seed(0)
        layers = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        return nn.Sequential(*layers).double()

    (x, y), *_ = batches(rng(), 1, size=30)
    first = with_norm()
    first(mine(Place(0, place.size, place.shared), x))
    model, optimizer, grad_filter = start(place, 2, model=with_norm(), samples="worker")
    step(model, optimizer, mine(place, x), mine(place, y))
    for name, buffer in first.named_buffers():
        assert torch.equal(model.module.get_buffer(name), buffer), name
    is_last = place.rank == place.size - 1
    assert grad_filter.stats.sent["buffers"] == (0 if is_last else 8 * (6 + 6 + 1))
    grad_filter.detach()


@check
def detaching_gives_ddp_back_and_a_second_filter_may_follow(place):
    model, optimizer, grad_filter = start(place, 6)
    with pytest.raises(RuntimeError, match="already has a filter"):
        dome.distributed.attach(model, optimizer, 6)
    (x, y), *_ = batches(rng(), 1)
    grad_filter.detach()
    grad_filter.detach()
    plain = small_classifier()
    cross_entropy(plain(x), y).backward()
    cross_entropy(model(mine(place, x)), mine(place, y)).backward()
    torch.testing.assert_close(flat_grad(model), flat_grad(plain), **TIGHT)
    again = dome.distributed.attach(model, optimizer, 6)
    optimizer.step()
    assert again.stats.step == 1
    again.detach()


@check
def what_cannot_work_is_refused_by_name(place):
    model = small_classifier()
    with pytest.raises(ValueError, match="must be a DistributedDataParallel"):
        dome.distributed.attach(model, sgd(model), 6)
    ddp = DistributedDataParallel(model)
    some = torch.optim.SGD([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"'0\.bias' is trained, but not by this"):
        dome.distributed.attach(ddp, some, 6)
    with pytest.raises(ValueError, match="samples must be one of"):
        dome.distributed.attach(ddp, sgd(ddp), 6, samples="batch")
    with pytest.raises(ValueError, match="update_every must be at least 1"):
        dome.distributed.attach(ddp, sgd(ddp), 6, update_every=0)
    static = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="has static_graph=True"):
        dome.distributed.attach(static, sgd(static), 6)


@check
def a_communication_hook_is_refused_before_and_after_attaching(place):
    hook = default_hooks.fp16_compress_hook
    hooked = DistributedDataParallel(small_classifier())
    hooked.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="the communication hook 'fp16_compress_hook'"):
        dome.distributed.attach(hooked, sgd(hooked), 6)
    model, optimizer, _ = start(place, 6)
    model.register_comm_hook(None, hook)
    ((x, y),) = batches(rng(), 1)
    cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="which would not run"):
        optimizer.step()


@check
def a_parameter_that_is_unfrozen_later_is_named_on_all_workers(place):
    module = small_classifier()
    module[0].requires_grad_(False)
    model, optimizer, _ = start(place, 6, module)
    module[0].requires_grad_(True)
    ((x, y),) = batches(rng(), 1)
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is trained, but"):
        optimizer.step()


def message_bytes(place, compressor):
    """What a worker sends of messages of 195 numbers, by the compressor's own word."""
    size = compressor.num_bits(195) // 8
    if compressor.is_linear:
        numbers = size - FRONT_BYTES  # which stay
        return -(-2 * (place.size - 1) * numbers // place.size)
    return (place.size - 1) * size


@check
def every_compressor_leaves_all_workers_with_the_same_bits(place):
    for name, make in COMPRESSORS.items():
        compressor = make(195)
        model, optimizer, grad_filter = start(
            place, 4, model=small_classifier(torch.float32), compressor=compressor
        )
        before = flat(model)
        for x, y in batches(rng(), 3, dtype=torch.float32):
            step(model, optimizer, mine(place, x), mine(place, y))
            same_everywhere(place, flat(model))
            same_everywhere(place, flat_grad(model))
        assert not torch.equal(flat(model), before)
        stats = grad_filter.stats
        assert stats.sent["samples"] == stats.sent["gradient"] == 0
        if "powersgd" not in name:
            assert stats.sent["messages"] == message_bytes(place, compressor), name
        assert stats.step == 3
        assert stats.total_bytes_sent == 3 * stats.bytes_sent
        grad_filter.detach()


@check
def messages_bring_the_average_of_what_each_worker_filtered(place):
    exact = {"value_dtype": torch.float64}
    # Without loss, or linear: the average of messages is the message of the average.
    for make in (
        lambda: TopK(1, **exact),
        lambda: ErrorFeedback(TopK(1, **exact)),
        lambda: RandomK(5, **exact),
        lambda: HadamardSketch(5, **exact),
        lambda: GaussianSketch(5, **exact),
    ):
        compressor = make()
        model, optimizer, grad_filter = start(place, 6, compressor=make())
        twin = small_classifier()
        trackers = [
            dome.StreamingPower(195, 6, dtype=torch.float64) for _ in range(place.size)
        ]
        for x, y in batches(rng(), 3):
            filtered = []
            twin.load_state_dict(model.module.state_dict())
            for worker, tracker in enumerate(trackers):
                there = Place(worker, place.size, place.shared)
                rows = per_sample_loop(
                    twin, cross_entropy, mine(there, x), mine(there, y)
                )
                tracker.update(rows)
                filtered.append(tracker.project_out(rows.mean(dim=0)))
            step(model, optimizer, mine(place, x), mine(place, y))
            average = torch.stack(filtered).mean(dim=0)
            expected = compressor.decode(compressor.encode(average))
            torch.testing.assert_close(flat_grad(model), expected, **TIGHT)
        grad_filter.detach()


@check
def a_worker_without_samples_sends_a_message_all_the_same(place):
    model, optimizer, grad_filter = start(place, 4, compressor=TopK(5))
    for x, y in batches(rng(), 2):
        optimizer.zero_grad()
        if place.rank == 0:
            cross_entropy(model(x), y).backward()
        optimizer.step()
        same_everywhere(place, flat(model))
        assert flat_grad(model).any()
    grad_filter.detach()


@check
def a_gradient_that_cannot_be_compressed_is_an_error_on_every_worker(place):
    model, _, grad_filter = start(place, 4, compressor=TopK(5))
    (x, y), *_ = batches(rng(), 1)
    cross_entropy(model(mine(place, x)), mine(place, y)).backward()
    if place.rank == 1:
        model.module[0].bias.grad[0] = float("inf")
    with pytest.raises(ValueError, match="gradient of rank 1 cannot be compressed"):
        grad_filter.step()
    grad_filter.detach()


@check
def synchronised_bases_are_the_leading_part_of_the_averaged_covariance(place):
    for tracker in ("power", "svd"):
        model, optimizer, grad_filter = start(
            place, 5, compressor=HadamardSketch(2), share=3, tracker=tracker
        )
        for i, (x, y) in enumerate(batches(rng(), 6, size=36)):
            own = grad_filter.trackers["all"]
            if i == 3:
                average = averaged_covariance(place, own)
                leading = torch.linalg.eigh(average)[1][:, -5:]
                grad_filter._world.share_bases()
                same_everywhere(place, own.basis)
                assert largest_angle(leading, own.basis) < 1e-6
            step(model, optimizer, mine(place, x), mine(place, y))
            sent = grad_filter.stats.sent
            assert (sent["basis"] > 0) == (i == 3)
            # That of an all-reduce of the basis, filled up, and the eigenvalues.
            length = -(-195 // place.size)
            assert sent["basis"] <= (place.size - 1) * 8 * (2 * length * 5 + 5)
            assert grad_filter.stats.fraction > 0
        grad_filter.detach()


def averaged_covariance(place, tracker):
    bases = [torch.empty(195, 5).double() for _ in range(place.size)]
    values = [torch.empty(5).double() for _ in range(place.size)]
    dist.all_gather(bases, tracker.basis.contiguous())
    dist.all_gather(values, tracker.eigenvalues)
    pairs = zip(bases, values, strict=True)
    return sum(U @ torch.diag(v) @ U.T for U, v in pairs) / place.size


@check
def options_of_sharing_are_checked(place):
    model = DistributedDataParallel(small_classifier())
    attach = dome.distributed.attach
    with pytest.raises(ValueError, match='share must be "own"'):
        attach(model, sgd(model), 4, TopK(5), share=0)
    with pytest.raises(ValueError, match="share needs a compressor"):
        attach(model, sgd(model), 4, share=10)
    with pytest.raises(ValueError, match="GradScaler checks gradients before"):
        attach(model, sgd(model), 4, scaler=torch.amp.GradScaler("cpu"))


def train(place, model, optimizer, data):
    for x, y in data:
        step(model, optimizer, mine(place, x), mine(place, y))


def resume(place, saved, **options):
    """A run that goes on from what was saved."""
    module = small_classifier(seed=7)
    module.load_state_dict(saved["model"])
    model, optimizer, grad_filter = start(place, model=module, **options)
    optimizer.load_state_dict(saved["optimizer"])
    grad_filter.load_state_dict(saved["filter"])
    return model, optimizer, grad_filter


def everything(model, optimizer, grad_filter):
    return {
        "model": copy.deepcopy(model.module.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "filter": {k: v.clone() for k, v in grad_filter.state_dict().items()},
    }


RUNS = {
    "power": {"rank": 40},
    "product": {"rank": 5},  # few enough for a basis kept as a product
    "svd": {"rank": 6, "tracker": "svd"},
    "layers": {"rank": 5, "layout": "layerwise", "oversample": 2},
    "worker": {"rank": 3, "samples": "worker"},
    "compressed": {"rank": 4},
}


def run_options(name):
    extra = {"compressor": ErrorFeedback(TopK(5))} if name == "compressed" else {}
    return RUNS[name] | extra


@check
def a_run_saved_on_three_workers_goes_on_on_any_number(place):
    data = list(batches(rng(), 8))
    for name in RUNS:
        path = place.shared / f"{name}.pt"
        if place.size == 3:
            run = start(place, **run_options(name))
            train(place, *run[:2], data[:4])
            saved = everything(*run)
            train(place, *run[:2], data[4:])
            if place.rank == 0:
                torch.save(saved | {"end": flat(run[0])}, path)
            dist.barrier()
            run[2].detach()
        saved = torch.load(path, weights_only=True)
        again = resume(place, saved, **run_options(name))
        train(place, *again[:2], data[4:6])
        if place.size == 2:
            # For one process, which goes on from here.
            saved_again = everything(*again)
            if place.rank == 0:
                end = {"end": saved["end"]}
                torch.save(saved_again | end, path.with_suffix(".2.pt"))
        train(place, *again[:2], data[6:])
        same_everywhere(place, flat(again[0]))
        if place.size == 3:
            assert torch.equal(flat(again[0]), saved["end"]), name
        elif name not in ("worker", "compressed"):
            # Those two take samples worker by worker: fewer workers, other samples.
            torch.testing.assert_close(flat(again[0]), saved["end"], **TIGHT)
        again[2].detach()


@check
def a_state_may_be_gathered_on_one_worker_only(place):
    model, optimizer, grad_filter = start(place, 5)
    (x, y), *_ = batches(rng(), 1)
    step(model, optimizer, mine(place, x), mine(place, y))
    everywhere = grad_filter.state_dict()
    last = place.size - 1
    state = grad_filter.state_dict(only=last)
    if place.rank == last:
        assert state.keys() == everywhere.keys()
        assert all(torch.equal(v, everywhere[k]) for k, v in state.items())
    else:
        assert state == {}
    grad_filter.detach()


@check
def a_state_of_another_model_or_rank_is_refused(place):
    _, _, grad_filter = start(place, 5)
    state = grad_filter.state_dict()
    grad_filter.detach()
    _, _, other = start(place, 6)
    with pytest.raises(ValueError, match="tracks 5 directions"):
        other.load_state_dict(state)
    other.detach()


@check
def workers_at_different_steps_are_told_apart(place):
    _, _, grad_filter = start(place, 6)
    grad_filter._num_steps = 5 if place.rank else 4
    with pytest.raises(RuntimeError, match=r"different steps, rank by rank \[4, 5"):
        grad_filter.step()
    grad_filter.detach()


@check
def a_worker_that_does_not_come_is_an_error_within_the_timeout(place):
    group = dist.new_group(timeout=timedelta(seconds=2))
    model, optimizer, _ = start(place, 6, ddp={"process_group": group})
    (x, y), *_ = batches(rng(), 1)
    gave_up = place.shared / f"gave_up.{place.size}"
    gave_up.mkdir(exist_ok=True)
    if place.rank == place.size - 1:
        end = time.monotonic() + 40
        while len(list(gave_up.iterdir())) < place.rank and time.monotonic() < end:
            time.sleep(0.05)
    else:
        message = rf"rank {place.rank} of .* gave up at the start of the step "
        with pytest.raises(RuntimeError, match=message):
            step(model, optimizer, mine(place, x), mine(place, y))
        (gave_up / str(place.rank)).touch()
    dist.barrier()
