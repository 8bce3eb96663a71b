"""What a device gets instead of a processor's row blocks: few, large products."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dome.trackers import linalg
from dome.trackers.basis import FactoredBasis
from dome.trackers.linalg import Shard
from dome.trackers.parts import parts_of

F64 = torch.float64
PRODUCTS = {"mm", "mv", "bmm", "addmm", "addmm_", "addmv", "addmv_", "baddbmm"}
RANK, SAMPLES = 3, 4


def basis(S):
    U = FactoredBasis(Shard.whole(len(S)), RANK, S.dtype, S.device, seed=0)
    U.write_(S)
    return U


def turned(S, G, c):
    """U P + Gᵀ M, with S that takes the samples in."""
    U = basis(S)
    P = torch.eye(RANK, dtype=F64) + 0.1
    U.turn_(U.turn(P), parts_of(G), c.cpu().expand(SAMPLES, -1).contiguous())
    return U.matrix


PASSES = {
    "product": lambda S, G, c: linalg.product(G, S),
    "one vector": lambda S, G, c: linalg.product(G[:1], S),
    "gram": lambda S, G, c: linalg.gram(S),
    "squared norms": lambda S, G, c: linalg.squared_norms(G),
    "subtract": lambda S, G, c: basis(S).project_out(G[0], None, 1.0),
    "turn": turned,
}
every_pass = pytest.mark.parametrize("run", PASSES.values(), ids=PASSES.keys())


class Counting(TorchDispatchMode):
    """Counts products."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.found[name] += name in PRODUCTS
        return func(*args, **(kwargs or {}))


def operands(rng, dim, place, dtype=F64):
    S, G = (
        torch.randn(s, generator=rng, dtype=F64) for s in ((dim, RANK), (SAMPLES, dim))
    )
    c = torch.arange(1.0, RANK + 1, dtype=F64)
    return S.to(place, dtype), G.to(place, dtype), c.to(place)


@every_pass
@pytest.mark.parametrize("room", [2**26, 1000], ids=["at once", "in blocks"])
def test_passes_over_the_rows_are_those_of_the_cpu(run, room, device, monkeypatch):
    # Without room for all of it there are several blocks on a device, too.
    monkeypatch.setattr(linalg, "DEVICE_NUMBERS", room)
    found = [
        run(*operands(torch.Generator().manual_seed(3), 9001, place)).cpu()
        for place in (device.name, "cpu")
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-9)


@every_pass
def test_the_number_of_products_does_not_grow_with_the_rows(run, simulated, rng):
    counts = []
    for dim in (140_000, 560_000):
        taken = operands(rng, dim, simulated.name, torch.float32)
        with Counting() as counting:
            run(*taken)
        counts.append(counting.found.total())
    assert counts[0] == counts[1] <= 4  # of which some are of small matrices


def test_on_a_processor_it_does(rng):
    counts = []
    for dim in (140_000, 2_240_000):
        with Counting() as counting:
            linalg.gram(operands(rng, dim, "cpu", torch.float32)[0])
        counts.append(counting.found.total())
    assert counts[1] > counts[0] > 0
