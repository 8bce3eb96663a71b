"""Optimizers of other packages behind a filter. Each is skipped where it is missing."""

import copy

import pytest
import torch
from models import batches, small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome
import dome.distributed

LR = 1e-2


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


def vectors(model):
    return [p for p in model.parameters() if p.dim() < 2]


def muon(model):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon is in torch 2.9 and newer")
    return torch.optim.Muon(matrices(model), lr=LR)


def with_low_rank(make, **options):
    """An optimizer that keeps its state for matrices in few dimensions."""

    def made(model):
        low = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "proj_type": "std"}
        thin = {"params": matrices(model)} | low | options
        return make([{"params": vectors(model)}, thin], lr=LR)

    return made


def galore(model):
    package = pytest.importorskip("galore_torch", exc_type=ImportError)
    return with_low_rank(package.GaLoreAdamW)(model)


def fira(model):
    package = pytest.importorskip("fira")
    return with_low_rank(package.FiraAdamW, alpha=1.0)(model)


def apollo(model):
    package = pytest.importorskip("apollo_torch", exc_type=ImportError)
    words = {"proj": "random", "scale_type": "channel"}
    return with_low_rank(package.APOLLOAdamW, **words)(model)


def soap(model):
    package = pytest.importorskip("pytorch_optimizer")
    return package.SOAP(model.parameters(), lr=LR, precondition_frequency=3)


def schedule_free(model):
    package = pytest.importorskip("schedulefree")
    optimizer = package.AdamWScheduleFree(model.parameters(), lr=LR)
    optimizer.train()
    return optimizer


MAKERS = (muon, soap, galore, fira, apollo, schedule_free)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("default")
def test_it_steps_on_the_filtered_gradient(make, rng):
    model = small_classifier(torch.float32)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    optimizer = make(model)
    grad_filter = dome.attach(model, optimizer, rank=4)
    torch.manual_seed(1)
    by_hand = make(twin)
    held = {id(p) for group in by_hand.param_groups for p in group["params"]}
    only = [p for p in twin.parameters() if id(p) in held]
    own = dome.GradientFilter(twin, 4, parameters=only)
    before = copy.deepcopy(model.state_dict())
    for x, y in batches(rng, 8, dtype=torch.float32):
        torch.manual_seed(2)  # APOLLO draws its projections from the global generator
        train(model, optimizer, x, y)
        torch.manual_seed(2)
        train(twin, by_hand, x, y, own)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert 0 < grad_filter.stats.kept_norm < 1
    assert not torch.equal(model[0].weight, before["0.weight"])


def train(model, optimizer, x, y, own=None):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    if own is not None:
        own.step()
    optimizer.step()


class ZeROOptimizer:
    """Stands for ``deepspeed.runtime.base_optimizer.ZeROOptimizer``."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stands for that of ZeRO's stages 1 and 2."""


class DeepSpeedEngine(nn.Module):
    """Stands for what ``deepspeed.initialize`` returns."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_zero_of_deepspeed_is_refused_by_name():
    model = small_classifier()
    with pytest.raises(ValueError, match="is DeepSpeed's ZeRO, which reduces and cuts"):
        dome.attach(model, DeepSpeedZeroOptimizer(model.parameters()), rank=4)
    engine, optimizer = DeepSpeedEngine(model), torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="a DeepSpeedEngine: DeepSpeed reduces"):
        dome.attach(engine, optimizer, rank=4)
    with pytest.raises(ValueError, match="a DeepSpeedEngine: DeepSpeed reduces"):
        dome.distributed.attach(engine, optimizer, rank=4)
    model[0].weight.ds_tensor = model[0].weight.data  # stage 3
    with pytest.raises(ValueError, match=r"'0\.weight' is cut by DeepSpeed's ZeRO"):
        dome.attach(model, optimizer, rank=4)
