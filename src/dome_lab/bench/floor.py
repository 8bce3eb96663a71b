"""What this machine can do: its rate of float32 products, and of copying.

Letters: D parameters, K directions, B samples. An update cannot take less time than its
products take at the best rate measured here for their shapes, nor less than it takes to
bring U and the samples from memory.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dome.numerics.products import is_pairwise
from dome_lab.bench.timing import Clock

BLOCKS = (2048, 8192)  # rows at once; the better rate counts
NUM_REPEATS = 5
# Beyond the caches: 64 MB for a processor, 512 MB for a GPU.
COPY_NUMBERS = {"cpu": 16_000_000, "cuda": 128_000_000}
# Sizes of square products: large enough for all cores, and for all that a GPU has.
SQUARE = {"cpu": 1024, "cuda": 4096}
FLOAT32 = 4

Work = tuple[Callable[[], object], int]  # what to run, and its flops
Maker = Callable[[int], Work]


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of product in an update.

    Attributes:
        name: The product, in symbols.
        flops: Floating-point operations for all D rows.
        rate: The best rate measured for its shape, flops a second.
    """

    name: str
    flops: int
    rate: float

    @property
    def seconds(self) -> float:
        """The least time it can take."""
        return self.flops / self.rate


def update_products(
    dim: int,
    rank: int,
    batch_size: int,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> list[Product]:
    """The products of one update in Gram form, with the rates of this machine.

    Without U P, 2 D K² flops: that may be put off for as long as one likes.
    """
    D, K, B = dim, rank, batch_size
    kinds = [
        ("H U", 2 * D * B * K, _times_basis(B, K, device)),
        ("Hᵀ M", 2 * D * B * K, _from_samples(B, K, device)),
    ]
    if is_pairwise(K, B):
        kinds.append(("H Hᵀ", 2 * D * B * B, _times_basis(B, B, device)))
    else:
        kinds.append(("Hᵀ V", 2 * D * B * K, _from_samples(B, K, device)))
        kinds.append(("H (Hᵀ V)", 2 * D * B * K, _times_basis(B, K, device)))
    return [
        Product(name, flops, max(_rate(make, rows, clock) for rows in (*BLOCKS, D)))
        for name, flops, make in kinds
    ]


def update_bytes(dim: int, rank: int, batch_size: int) -> int:
    """Bytes an update moves: U read twice and written once, the samples read twice."""
    return FLOAT32 * dim * (3 * rank + 2 * batch_size)


def samples_bytes(dim: int, batch_size: int) -> int:
    """Bytes of the samples, written once and read once."""
    return FLOAT32 * 2 * dim * batch_size


def copy_rate(
    num_numbers: int | None = None,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> float:
    """Bytes read plus bytes written a second, by the best of a few large copies."""
    num_numbers = num_numbers or for_device(COPY_NUMBERS, device)
    source = torch.zeros(num_numbers, device=device)
    target = torch.zeros(num_numbers, device=device)
    best = _best_seconds(lambda: target.copy_(source), clock)
    return 2 * FLOAT32 * num_numbers / best


def square_rate(
    device: str = "cpu", clock: Clock = time.perf_counter, size: int | None = None
) -> float:
    """Flops a second of a large square product, the best this machine does."""
    size = size or for_device(SQUARE, device)
    return _rate(_recombined(size, device), size, clock)


def square_product(device: str = "cpu") -> Work:
    """A large square product to run now and then, and its flops."""
    size = for_device(SQUARE, device)
    return _recombined(size, device)(size)


def for_device(sizes: Mapping[str, int], device: str) -> int:
    """The size for this kind of device; a kind that has none gets a processor's."""
    return sizes.get(torch.device(device).type, sizes["cpu"])


def _rate(make: Maker, rows: int, clock: Clock) -> float:
    run, flops = make(rows)
    return flops / _best_seconds(run, clock)


def _best_seconds(run: Callable[[], object], clock: Clock) -> float:
    run()
    best = float("inf")
    for _ in range(NUM_REPEATS):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def _times_basis(left: int, right: int, device: str) -> Maker:
    """(left, rows) times (rows, right): a product over the parameters."""

    def make(rows: int) -> Work:
        H = torch.ones(left, rows, device=device)
        U = torch.ones(rows, right, device=device)
        out = torch.empty(left, right, device=device)
        return lambda: torch.mm(H, U, out=out), 2 * left * rows * right

    return make


def _from_samples(batch_size: int, rank: int, device: str) -> Maker:
    """(rows, B) times (B, K), the samples lying as (B, rows)."""

    def make(rows: int) -> Work:
        H = torch.ones(batch_size, rows, device=device)
        M = torch.ones(batch_size, rank, device=device)
        out = torch.empty(rows, rank, device=device)
        return lambda: torch.mm(H.T, M, out=out), 2 * rows * batch_size * rank

    return make


def _recombined(rank: int, device: str) -> Maker:
    """(rows, K) times (K, K)."""

    def make(rows: int) -> Work:
        U = torch.ones(rows, rank, device=device)
        P = torch.ones(rank, rank, device=device)
        out = torch.empty(rows, rank, device=device)
        return lambda: torch.mm(U, P, out=out), 2 * rows * rank * rank

    return make
