"""``plan``: what the filter will cost in memory and time, before training.

Letters: D parameters, K directions, B samples. The basis takes D K numbers and the
samples D B; a step takes 4 D B K + 2 D min(B², 2 B K) flops beside the backward
pass, and 2 D K² more if the basis is written out at every update. Directions of rank r
in each weight (n, m) take K r (n + m) numbers; samples with T positions B T n numbers
more and 2 B T K r (2 m + 3 n) flops.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dome.parameters import Layout
from dome.planning.memory import (
    available_memory,
    directions_memory,
    filter_memory,
    largest_rank,
    num_outputs,
)
from dome.planning.units import size
from dome.trackers import StreamingPower
from dome.trackers.basis import may_be_factored
from dome.trackers.samples import check_whole
from dome.trackers.thin import is_thin

# Layout, storage, and whether samples are streamed: that takes nothing but freedom, to
# accumulate gradients.
CANDIDATES = (
    ("global", torch.float32, False),
    ("global", torch.bfloat16, False),
    ("layerwise", torch.float32, False),
    ("layerwise", torch.bfloat16, False),
    ("layerwise", torch.float32, True),
    ("layerwise", torch.bfloat16, True),
)
# Of the last choice: directions of low rank, where nothing else fits.
DIRECTION_RANK = 4
TRIAL_NUMBERS = 8_000_000  # size of the basis and samples of the timed trial: 32 MB
NUM_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the filter.

    Attributes:
        layout: "global" or "layerwise".
        basis_dtype: Storage of the basis.
        memory: Bytes beyond what training takes without the filter.
        seconds: Time of one update and projection, not counting how samples are taken.
        fits: Whether ``memory`` is available.
        projection: The part of ``seconds`` that steps between updates take too.
        largest_rank: The most directions for which the memory is available; 0 if none.
        direction_rank: Rank of the directions in each weight; None: as they are.
        stream: Samples are used and dropped layer by layer.
    """

    layout: str
    basis_dtype: torch.dtype
    memory: int
    seconds: float
    fits: bool
    projection: float = 0.0
    largest_rank: int = 0
    direction_rank: int | None = None
    stream: bool = False

    @property
    def storage(self) -> str:
        """How directions are stored, in a word or two."""
        if self.direction_rank is not None:
            return f"of rank {self.direction_rank}"
        dtype = str(self.basis_dtype).removeprefix("torch.")
        return f"{dtype}, stream" if self.stream else dtype

    @property
    def options(self) -> str:
        """What to pass to ``attach`` for it."""
        if self.direction_rank is not None:
            return f'layout="{self.layout}", direction_rank={self.direction_rank}'
        exact = f'layout="{self.layout}", basis_dtype={self.basis_dtype}'
        return f"{exact}, stream=True" if self.stream else exact

    def seconds_with(self, update_every: int) -> float:
        """Time of a step on average, where every n-th one updates the basis."""
        return self.projection + (self.seconds - self.projection) / update_every


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted cost of every choice, the paper's first.

    Attributes:
        dim: Parameters D.
        rank: Directions K.
        batch_size: Samples B.
        available: Bytes of memory available.
        choices: One for each layout and storage.
    """

    dim: int
    rank: int
    batch_size: int
    available: int
    choices: tuple[Choice, ...]

    @property
    def suggestion(self) -> str:
        """What to pass to ``attach``, in words."""
        for choice in self.choices:
            if choice.fits:
                return f"attach(..., {choice.options})"
        best = max(self.choices, key=lambda choice: choice.largest_rank)
        if best.largest_rank:
            return (
                f"nothing fits at rank {self.rank}: attach(..., "
                f"rank={best.largest_rank}, {best.options}) would"
            )
        return "nothing fits: use a smaller batch, or fewer trainable parameters"

    def __str__(self) -> str:
        lines = [
            f"{self.dim:,} parameters, rank {self.rank}, batches of {self.batch_size}; "
            f"{size(self.available)} available",
            f"{'layout':<11}{'basis':<17}{'memory':>10}{'time a step':>13}",
        ]
        for choice in self.choices:
            verdict = "" if choice.fits else "   does not fit"
            lines.append(
                f"{choice.layout:<11}{choice.storage:<17}{size(choice.memory):>10}"
                f"{choice.seconds * 1e3:>10.1f} ms{verdict}"
            )
        return "\n".join([*lines, self.suggestion])


def plan(
    model: nn.Module,
    rank: int,
    batch_size: int,
    *,
    positions: int = 1,
    memory: int | None = None,
) -> Plan:
    """Predict memory and time of the filter, and suggest what would fit.

    Times come from a short trial of the real update on this device, scaled by its
    flops; nothing of the model's size is allocated. A model on the device "meta", which
    takes no memory itself, is planned for the CPU.

    Args:
        model: The model that will be trained.
        rank: Number of directions K.
        batch_size: Number of samples B in a step.
        positions: How many positions of a sample weights meet, such as the words of a
            text: what directions of low rank take depends on it.
        memory: Bytes that the filter may take; what is available now if not given.
    """
    layout = Layout(model)
    check_whole(rank=rank, batch_size=batch_size, positions=positions)
    if not 1 <= rank <= layout.dim:
        raise ValueError(f"rank must be between 1 and {layout.dim}, got {rank}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if positions < 1:
        raise ValueError(f"positions must be at least 1, got {positions}")
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be at least 1 byte, got {memory}")
    device = layout.device if layout.device.type != "meta" else torch.device("cpu")
    available = available_memory(device) if memory is None else memory
    speed = _timed(layout.dim, device, rank, batch_size)
    choices = tuple(
        _choice(
            (kind, dtype, stream),
            Layout(model, kind),
            *(rank, batch_size, available, speed),
        )
        for kind, dtype, stream in CANDIDATES
    )
    sample = _Sample(positions, num_outputs(model, positions))
    choices += (_of_low_rank(layout, rank, batch_size, sample, available, speed),)
    return Plan(layout.dim, rank, batch_size, available, choices)


def update_flops(dim: int, rank: int, batch_size: int, itemsize: int = 4) -> int:
    """Floating-point operations of one update and projection.

    Args:
        dim: D.
        rank: K.
        batch_size: B.
        itemsize: Bytes in which a number of the basis is stored.
    """
    B, K = batch_size, rank
    turn = 0 if may_be_factored(dim, K, itemsize) else 2 * K * K
    return dim * (4 * B * K + turn + 2 * min(B * B, 2 * B * K) + 4 * K)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Positions of a sample, and its numbers behind all large weights."""

    positions: int
    outputs: int


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds of an update and projection by flops, of a projection by U's numbers."""

    per_flop: float
    per_number: float


def _choice(
    candidate: tuple[str, torch.dtype, bool],
    layout: Layout,
    rank: int,
    batch_size: int,
    available: int,
    speed: _Speed,
) -> Choice:
    kind, dtype, stream = candidate
    dims = [block.dim for block in layout.blocks]
    ranks = [min(rank, dim) for dim in dims]
    numbers = sum(dim * k for dim, k in zip(dims, ranks, strict=True))
    flops = sum(
        update_flops(dim, k, batch_size, dtype.itemsize)
        for dim, k in zip(dims, ranks, strict=True)
    )
    memory = partial(
        filter_memory,
        dims,
        batch_size=batch_size,
        itemsize=dtype.itemsize,
        stream=stream,
    )
    seconds = flops * speed.per_flop
    return Choice(
        kind,
        dtype,
        memory(rank),
        seconds,
        memory(rank) <= available,
        min(numbers * speed.per_number, seconds),
        largest_rank(memory, layout.dim, available),
        stream=stream,
    )


def _of_low_rank(
    layout: Layout,
    rank: int,
    batch_size: int,
    sample: _Sample,
    available: int,
    speed: _Speed,
) -> Choice:
    """Directions of low rank in one block."""
    shapes = [slot.shape for slot in layout.slots]
    memory = partial(
        directions_memory,
        shapes,
        batch_size=batch_size,
        direction_rank=DIRECTION_RANK,
        outputs=sample.outputs,
    )
    width = rank * DIRECTION_RANK
    thin = [s for s in shapes if is_thin(s, DIRECTION_RANK, layout.dim)]
    sides = sum(3 * shape[0] + 2 * shape[1:].numel() for shape in thin)
    plain = layout.dim - sum(shape.numel() for shape in thin)
    projection = 4 * width * layout.dim
    update = 2 * batch_size * (sample.positions * width * sides + 2 * rank * plain)
    return Choice(
        "global",
        torch.float32,
        memory(rank),
        (projection + update) * speed.per_flop,
        memory(rank) <= available,
        projection * speed.per_flop,
        largest_rank(memory, layout.dim, available),
        DIRECTION_RANK,
    )


def _timed(dim: int, device: torch.device, rank: int, batch_size: int) -> _Speed:
    """Best of a few real updates on a slice of the problem."""
    rows = max(TRIAL_NUMBERS // (rank + batch_size), 1)
    dim = min(dim, max(rank, rows))
    random = torch.Generator(device).manual_seed(0)
    samples = torch.randn(max(batch_size, 2), dim, generator=random, device=device)
    tracker = StreamingPower(dim, rank, device=device)
    tracker.update(samples)  # the first update takes another path
    both = alone = float("inf")
    for _ in range(NUM_TRIALS):
        start = time.perf_counter()
        tracker.update(samples)
        float(tracker.project_out(samples[0]).sum())  # waits for an accelerator
        middle = time.perf_counter()
        float(tracker.project_out(samples[0]).sum())
        alone = min(alone, time.perf_counter() - middle)
        both = min(both, middle - start)
    flops = update_flops(dim, rank, batch_size)
    return _Speed(both / flops, alone / (dim * rank))
