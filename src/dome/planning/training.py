"""``plan``: what the filter will cost in memory and time, before training.

Letters: D parameters, K directions, B samples. The basis takes D K numbers and the
samples D B; a step takes 4 D B K + 2 D min(B², K² + B K) flops beside the backward
pass, and 2 D K² more if the basis is written out at every update.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dome.numerics.factored import may_be_factored
from dome.numerics.passes import block_rows
from dome.parameters import Layout
from dome.trackers import StreamingPower

CANDIDATES = (
    ("global", torch.float32),
    ("global", torch.bfloat16),
    ("layerwise", torch.float32),
    ("layerwise", torch.bfloat16),
)
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
    """

    layout: str
    basis_dtype: torch.dtype
    memory: int
    seconds: float
    fits: bool
    projection: float = 0.0
    largest_rank: int = 0

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
                dtype = str(choice.basis_dtype)
                return f'attach(..., layout="{choice.layout}", basis_dtype={dtype})'
        per_direction = self.choices[0].memory / (self.rank + self.batch_size)
        most = int(0.9 * self.available / per_direction) - self.batch_size
        if most >= 1:
            return f"nothing fits at rank {self.rank}: rank={most} would"
        return "nothing fits: use a smaller batch, or fewer trainable parameters"

    def __str__(self) -> str:
        lines = [
            f"{self.dim:,} parameters, rank {self.rank}, batches of {self.batch_size}; "
            f"{_gigabytes(self.available)} available",
            f"{'layout':<11}{'basis':<10}{'memory':>10}{'time a step':>13}",
        ]
        for choice in self.choices:
            dtype = str(choice.basis_dtype).removeprefix("torch.")
            verdict = "" if choice.fits else "   does not fit"
            lines.append(
                f"{choice.layout:<11}{dtype:<10}{_gigabytes(choice.memory):>10}"
                f"{choice.seconds * 1e3:>10.1f} ms{verdict}"
            )
        return "\n".join([*lines, self.suggestion])


def plan(
    model: nn.Module, rank: int, batch_size: int, *, memory: int | None = None
) -> Plan:
    """Predict memory and time of the filter, and suggest what would fit.

    Times come from a short trial of the real update on this device, scaled by its
    flops; nothing of the model's size is allocated. A model on the device "meta", which
    takes no memory itself, is planned for the CPU.

    Args:
        model: The model that will be trained.
        rank: Number of directions K.
        batch_size: Number of samples B in a step.
        memory: Bytes that the filter may take; what is available now if not given.
    """
    layout = Layout(model)
    if not 1 <= rank <= layout.dim:
        raise ValueError(f"rank must be between 1 and {layout.dim}, got {rank}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be at least 1 byte, got {memory}")
    device = layout.device if layout.device.type != "meta" else torch.device("cpu")
    available = available_memory(device) if memory is None else memory
    speed = _timed(layout.dim, device, rank, batch_size)
    choices = []
    for kind, dtype in CANDIDATES:
        dims = [block.dim for block in Layout(model, kind).blocks]
        taken = _memory(dims, rank, batch_size, dtype.itemsize)
        flops = sum(
            update_flops(dim, min(rank, dim), batch_size, dtype.itemsize)
            for dim in dims
        )
        numbers = sum(dim * min(rank, dim) for dim in dims)
        choices.append(
            Choice(
                kind,
                dtype,
                taken,
                flops * speed.per_flop,
                taken < available,
                min(numbers * speed.per_number, flops * speed.per_flop),
                _largest_rank(dims, batch_size, dtype.itemsize, available),
            )
        )
    return Plan(layout.dim, rank, batch_size, available, tuple(choices))


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


def filter_memory(dim: int, rank: int, batch_size: int, itemsize: int) -> int:
    """Bytes of a filter with one basis, stored in ``itemsize`` bytes a number."""
    return _memory([dim], rank, batch_size, itemsize)


def _memory(dims: Sequence[int], rank: int, batch_size: int, itemsize: int) -> int:
    """Bytes of bases, samples, one block of rows, small matrices, gradient copies."""
    basis = sum(dim * min(rank, dim) for dim in dims) * itemsize
    samples = sum(dims) * batch_size * 4
    a_row = min(rank, max(dims)) + batch_size
    block = min(block_rows(a_row), max(dims)) * a_row * 4
    small = sum(8 * min(rank, dim) ** 2 for dim in dims) + 3 * 8 * batch_size**2
    return basis + samples + block + small + 3 * 4 * sum(dims)


def _largest_rank(
    dims: Sequence[int], batch_size: int, itemsize: int, available: int
) -> int:
    """The largest K whose memory is available, by bisection; 0 if none is."""
    fitting, too_much = 0, sum(dims) + 1
    while too_much - fitting > 1:
        middle = (fitting + too_much) // 2
        if _memory(dims, middle, batch_size, itemsize) < available:
            fitting = middle
        else:
            too_much = middle
    return fitting


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds of an update and projection by flops, of a projection by U's numbers."""

    per_flop: float
    per_number: float


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


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gigabytes(num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**30:.2f} GiB"
        if num_bytes >= 2**28
        else f"{num_bytes / 2**20:.1f} MiB"
    )
