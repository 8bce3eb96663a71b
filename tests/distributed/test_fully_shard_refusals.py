import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import dome
import dome.distributed
from dome.compression import TopK
from dome.distributed import fully_shard_checks

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs torch 2.9"
)


@pytest.fixture(autouse=True)
def one_worker(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def mesh(*names):
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


def attach(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"samples": "worker"} | options
    return dome.distributed.attach(model, optimizer, 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": "per_sample"}, 'takes samples="worker"'),
        ({"after": nn.Identity()}, "after gets the whole filtered gradient"),
        ({"tracker": dome.StreamingPower}, 'the tracker must be "power" or "svd"'),
        ({"compressor": TopK(4.0)}, "a compressor needs the whole gradient"),
    ],
)
def test_options_that_need_a_whole_gradient_are_refused(options, message):
    model = fully_shard(net(), mesh=mesh("shard"))
    with pytest.raises(ValueError, match=message):
        attach(model, **options)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()  # as it was


def hybrid():
    return fully_shard(net(), mesh=mesh("replicate", "shard"))


def tensor_parallel():
    return parallelize_module(net(), mesh("tensor"), {"0": ColwiseParallel()})


def both():
    grid = mesh("shard", "tensor")
    model = parallelize_module(net(), grid["tensor"], {"0": ColwiseParallel()})
    return fully_shard(model[0], mesh=grid["shard"])


def by_columns():
    place = lambda p: Shard(p.dim() - 1)  # noqa: E731
    return fully_shard(net(), mesh=mesh("shard"), shard_placement_fn=place)


def in_parts():
    model = net()
    fully_shard(model[0], mesh=mesh("shard"))
    return model


def with_a_stranger():
    model = fully_shard(net(), mesh=mesh("shard"))
    whole = torch.ones(4, 4, dtype=torch.float64)
    model.other = nn.Parameter(distribute_tensor(whole, mesh("other"), [Shard(0)]))
    return model


def with_a_reduce_scatter():
    class Mine:
        pass

    model = fully_shard(net(), mesh=mesh("shard"))
    model.set_custom_reduce_scatter(Mine())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hybrid, r"hybrid sharding \(HSDP\) is not supported"),
        (tensor_parallel, "split by tensor parallelism, which is not supported"),
        (both, "tensor parallelism with FSDP2 is not supported"),
        (by_columns, "'0.weight' is split along dimension 1"),
        (in_parts, "'2.weight' is trained, but not sharded by fully_shard"),
        (with_a_stranger, "'other' is trained, but not sharded by fully_shard"),
        (with_a_reduce_scatter, "already has a reduce-scatter, Mine"),
        (net, "must be a DistributedDataParallel or a model of fully_shard"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_ways_to_split_a_model_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        attach(make())


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:.*NO_SHARD")
def test_the_first_fsdp_is_refused_by_name():
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the first FSDP.*use fully_shard"):
        attach(model)


def test_a_second_filter_is_refused_and_may_follow_the_first():
    model = fully_shard(net(), mesh=mesh("shard"))
    first = attach(model)
    with pytest.raises(ValueError, match="already has a reduce-scatter, AllToAll"):
        attach(model)
    first.detach()
    attach(model).detach()


def test_an_older_torch_is_told_which_one_it_takes(monkeypatch):
    class Old(nn.Linear):
        """What a module of fully_shard was before torch 2.9."""

    Old.__name__ = "FSDPModule"
    with pytest.raises(RuntimeError, match=r"use torch 2\.9 or newer"):
        fully_shard_checks.check_supported(
            Old(2, 2), "worker", dome.options.FilterOptions(rank=1)
        )


def test_one_worker_equals_one_process():
    model, one = fully_shard(net(), mesh=mesh("shard")), net()
    one.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, one)]
    attach(model, optimizers[0])
    dome.attach(one, optimizers[1], 2, samples="microbatch")
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (12,), generator=generator)
        for m, optimizer in zip((model, one), optimizers, strict=True):
            optimizer.zero_grad()
            for x_part, y_part in zip(x.chunk(3), y.chunk(3), strict=True):
                (cross_entropy(m(x_part), y_part) / 3).backward()
            optimizer.step()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-9)
