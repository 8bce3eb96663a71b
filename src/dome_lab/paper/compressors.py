"""Compressors at a given rate: 32 D/rate bits for D numbers, or a little less.

Quantisers and PowerSGD come in steps, so each takes the largest message that fits; one
that cannot send so little is refused. Those that are biased have error feedback.
"""

from collections.abc import Callable, Iterable

from dome.compression import (
    QSGD,
    Compressor,
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from dome.compression.message import FRONT_BYTES
from dome.parameters import Layout
from dome_lab.paper.randomness import SKETCH_NOISE, generator
from dome_lab.paper.run import Run

NUMBER_BITS = 32
FRONT_BITS = 8 * FRONT_BYTES  # of every message, not counted here
ROUNDING = 64  # a message ends with a whole number, and with a whole byte
MOST_RANK = 16  # of PowerSGD
LEVELS = (127, 63, 31, 15, 7, 3, 1)  # of QSGD: as many bits less one


def make_compressor(run: Run, layout: Layout) -> Compressor | None:
    """What a run compresses the flat gradient with; None if it does not."""
    if run.rate is None:
        return None
    if run.compressor == "gaussian":
        noise = generator(run.seed, SKETCH_NOISE, layout.device)
        return GaussianSketch(run.rate, generator=noise)
    seed = generator(run.seed, SKETCH_NOISE).initial_seed()
    most = NUMBER_BITS * layout.dim / run.rate
    return _largest(_FAMILIES[run.compressor](run.rate, layout, seed), layout, most)


def times_fewer_bits(compressor: Compressor, dim: int) -> float:
    """How many times fewer bits the numbers in a message have, for D numbers."""
    return NUMBER_BITS * dim / _bits(compressor, dim)


def _largest(choices: Iterable[Compressor], layout: Layout, most: float) -> Compressor:
    """The first of some compressors, from large messages to small, that fits."""
    bits = 0
    for compressor in choices:
        bits = _bits(compressor, layout.dim)
        if bits <= most + ROUNDING:
            return compressor
    raise ValueError(
        f"{compressor!r} sends {bits:,} bits for {layout.dim:,} numbers, which is "
        f"more than the {most:,.0f} of this rate: choose a rate of at most "
        f"{NUMBER_BITS * layout.dim / bits:.3g}"
    )


def _bits(compressor: Compressor, dim: int) -> int:
    return compressor.num_bits(dim) - FRONT_BITS


def _top(rate: float, layout: Layout, _: int) -> Iterable[Compressor]:
    index_bits = max(1, (layout.dim - 1).bit_length())
    return [ErrorFeedback(TopK(rate * (1 + index_bits / NUMBER_BITS)))]


def _powers(_: float, layout: Layout, seed: int) -> Iterable[Compressor]:
    shapes = [slot.shape for slot in layout.slots]
    ranks = range(MOST_RANK, 0, -1)
    return [ErrorFeedback(PowerSGD(shapes, rank, seed=seed)) for rank in ranks]


_Family = Callable[[float, Layout, int], Iterable[Compressor]]
_FAMILIES: dict[str, _Family] = {
    "hadamard": lambda rate, _, seed: [HadamardSketch(rate, seed=seed)],
    "randomk": lambda rate, _, seed: [RandomK(rate, seed=seed)],
    "randomk+feedback": lambda rate, _, seed: [ErrorFeedback(RandomK(rate, seed=seed))],
    "topk+feedback": _top,
    "signsgd+feedback": lambda *_: [ErrorFeedback(SignSGD())],
    "terngrad": lambda _, __, seed: [TernGrad(seed=seed)],
    "qsgd": lambda _, __, seed: [QSGD(levels, seed=seed) for levels in LEVELS],
    "powersgd+feedback": _powers,
}
