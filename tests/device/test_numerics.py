"""What a device gets instead of a processor's row blocks: few, large products."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dome.numerics import cpu, passes

F64 = torch.float64
PRODUCTS = {"mm", "mv", "bmm", "addmm", "addmv_", "baddbmm", "baddbmm_", "addbmm"}
RANK, SAMPLES = 3, 4

PASSES = {
    "multiply": lambda S, G, c: passes.multiply(G, S),
    "one vector": lambda S, G, c: passes.multiply(G[:1], S),
    "gram": lambda S, G, c: passes.gram(S),
    "squared norms": lambda S, G, c: passes.squared_norms(G),
    "subtract": lambda S, G, c: passes.subtract_combination(G[0], S, c),
    "turn": lambda S, G, c: passes.recombine_(S, c[:, None] * c),
    "add": lambda S, G, c: passes.recombine_(S, None, G, c.expand(SAMPLES, -1)),
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


def outcome(run, S, G, c):
    result = run(S, G, c)
    return [S.cpu(), torch.zeros(0) if result is None else result.cpu()]


@every_pass
@pytest.mark.parametrize("room", [2**26, 1000], ids=["at once", "in blocks"])
def test_passes_over_the_rows_are_those_of_the_cpu(run, room, device, monkeypatch):
    # Without room for all of it there are several blocks on a device, too.
    monkeypatch.setattr(passes, "DEVICE_NUMBERS", room)
    found = [
        outcome(run, *operands(torch.Generator().manual_seed(3), 9001, place))
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
    assert counts[0] == counts[1] <= 2  # one, and one for rows that are left over


@pytest.mark.parametrize("name", ["gram", "turn"])
def test_on_a_processor_it_does(name, rng):
    counts = []
    for dim in (140_000, 560_000):
        with Counting() as counting:
            PASSES[name](*operands(rng, dim, "cpu", torch.float32))
        counts.append(counting.found.total())
    assert counts[1] > counts[0] > 0


def test_no_function_for_processors_is_called_on_a_device(simulated, rng, monkeypatch):
    def called(*_):
        raise AssertionError("for processors only")

    monkeypatch.setattr(cpu, "subtract_", called)
    taken = operands(rng, 500, simulated.name)
    for run in PASSES.values():
        run(*taken)
