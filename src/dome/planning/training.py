"""``plan``: what the filter will cost in memory and time, before training.

Letters: D parameters, K directions, B samples. The basis takes D K numbers and the
samples D B; a step takes 4 D B K + 2 D min(B², 2 B K) flops beside the backward
pass, and 2 D K² more if the basis is written out at every update. Directions of rank r
in each weight (n, m) take K r (n + m) numbers; samples with T positions B T n numbers
more and 2 B T K r (2 m + 3 n) flops.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dome.parameters import Layout
from dome.planning.memory import (
    FLOAT,
    available_memory,
    directions_memory,
    filter_memory,
    largest_rank,
    num_outputs,
)
from dome.planning.trial import (
    Clock,
    StepTimes,
    UpdateTimes,
    time_steps,
    time_updates,
)
from dome.planning.units import size
from dome.samples.calls import LossCall, LossFn
from dome.samples.tracing.nested import Value, all_tensors
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


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the filter.

    Attributes:
        layout: "global" or "layerwise".
        basis_dtype: Storage of the basis.
        memory: Bytes beyond what training takes without the filter.
        seconds: What the filter adds to a step that updates the basis; without a batch
            to plan for, not counting how samples are taken.
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
        plain: Seconds of forward and backward without a filter; None without a batch.
    """

    dim: int
    rank: int
    batch_size: int
    available: int
    choices: tuple[Choice, ...]
    plain: float | None = None

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
            f"{'layout':<11}{'basis':<17}{'memory':>10}{'time added':>13}",
        ]
        for choice in self.choices:
            verdict = "" if choice.fits else "   does not fit"
            lines.append(
                f"{choice.layout:<11}{choice.storage:<17}{size(choice.memory):>10}"
                f"{choice.seconds * 1e3:>10.1f} ms{verdict}"
            )
        return "\n".join([*lines, self._scope, self.suggestion])

    @property
    def _scope(self) -> str:
        if self.plain is None:
            return "time is that of the basis: give a batch that fits to add samples"
        return (
            f"time is what the filter adds to forward and backward, which take "
            f"{self.plain * 1e3:.1f} ms"
        )


def plan(
    model: nn.Module,
    rank: int,
    batch_size: int | None = None,
    loss_fn: LossFn | None = None,
    x: Value = None,
    y: Value = None,
    *,
    positions: int = 1,
    memory: int | None = None,
    samples_in: str | Sequence[str] | None = None,
    clock: Clock = time.perf_counter,
    **inputs: Value,
) -> Plan:
    """Predict memory and time of the filter, and suggest what would fit.

    Times come from short trials of the real update on this device, of a part of it
    where it is large. With a batch, a copy of the model takes a few steps too, and the
    times include what taking samples costs. A model on the device "meta", which takes
    no memory itself, is planned for the CPU.

    Args:
        model: The model that will be trained.
        rank: Number of directions K.
        batch_size: Number of samples B in a step; with a batch that of the batch.
        loss_fn: Maps predictions and targets to a scalar; None if the model returns its
            loss.
        x: Inputs, as in ``dome.verify``.
        y: Targets, as in ``dome.verify``.
        positions: How many positions of a sample weights meet, such as the words of a
            text: what directions of low rank take depends on it.
        memory: Bytes that the filter may take; what is available now if not given.
        samples_in: Which inputs hold samples, as in ``dome.attach``.
        clock: Tells seconds. On a busy machine, ``time.process_time`` with one thread.
        **inputs: More inputs by their names.
    """
    layout = Layout(model)
    call = LossCall.of(loss_fn, x, y, inputs) if x is not None or inputs else None
    if call is None and batch_size is None:
        raise ValueError(
            "give batch_size, or a batch: dome.plan(model, rank, None, loss_fn, x, y)"
        )
    of_batch = 1 if call is None else len(all_tensors((call.args, call.kwargs))[0])
    num = of_batch if batch_size is None else batch_size
    _check(layout, rank, num, positions, memory)
    device = layout.device if layout.device.type != "meta" else torch.device("cpu")
    available = available_memory(device) if memory is None else memory
    steps = None
    if call is not None and of_batch * layout.dim * FLOAT < available:
        thin = rank, DIRECTION_RANK
        steps = time_steps(model, call, samples_in, clock, thin)
        num = steps.num_samples if batch_size is None else batch_size
    batch_size = num
    timed = {
        kind: time_updates(
            [block.dim for block in Layout(model, kind).blocks],
            *(rank, batch_size, device, clock),
        )
        for kind in ("global", "layerwise")
    }
    added = Added.of(steps)
    choices = tuple(
        _choice(
            (kind, dtype, stream),
            Layout(model, kind),
            *(rank, batch_size, available, timed[kind], added),
        )
        for kind, dtype, stream in CANDIDATES
    )
    exact = timed["global"]
    flops = update_flops(layout.dim, rank, batch_size)
    measured = None if steps is None or steps.thin is None else steps.thin - steps.plain
    speed = _Speed((exact.update + exact.projection) / flops, added, measured)
    sample = _Sample(positions, num_outputs(model, positions))
    choices += (_of_low_rank(layout, rank, batch_size, sample, available, speed),)
    plain = None if steps is None else steps.plain
    return Plan(layout.dim, rank, batch_size, available, choices, plain)


def _check(
    layout: Layout, rank: int, batch_size: int, positions: int, memory: int | None
) -> None:
    check_whole(rank=rank, batch_size=batch_size, positions=positions)
    if not 1 <= rank <= layout.dim:
        raise ValueError(f"rank must be between 1 and {layout.dim}, got {rank}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if positions < 1:
        raise ValueError(f"positions must be at least 1, got {positions}")
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be at least 1 byte, got {memory}")


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
class Added:
    """Seconds that a filter without a basis adds to a step; 0 where nobody knows."""

    with_samples: float = 0.0
    without: float = 0.0

    @classmethod
    def of(cls, steps: StepTimes | None) -> "Added":
        """What was measured on a batch, if there was one."""
        if steps is None:
            return cls()
        without = max(steps.without - steps.plain, 0.0)
        return cls(max(steps.with_samples - steps.plain, without), without)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds by flop of updates, and what every filter adds; or what was measured."""

    per_flop: float
    added: Added
    measured: float | None = None


def _choice(
    candidate: tuple[str, torch.dtype, bool],
    layout: Layout,
    rank: int,
    batch_size: int,
    available: int,
    timed: UpdateTimes,
    added: Added,
) -> Choice:
    kind, dtype, stream = candidate
    dims = [block.dim for block in layout.blocks]
    exact, stored = (
        sum(update_flops(dim, min(rank, dim), batch_size, size) for dim in dims)
        for size in (torch.float32.itemsize, dtype.itemsize)
    )
    memory = partial(
        filter_memory,
        dims,
        batch_size=batch_size,
        itemsize=dtype.itemsize,
        stream=stream,
    )
    return Choice(
        kind,
        dtype,
        memory(rank),
        added.with_samples + timed.update * stored / exact + timed.projection,
        memory(rank) <= available,
        added.without + timed.projection,
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
    seconds = speed.measured
    if seconds is None:
        seconds = speed.added.with_samples + (projection + update) * speed.per_flop
    return Choice(
        "global",
        torch.float32,
        memory(rank),
        seconds,
        memory(rank) <= available,
        min(speed.added.without + projection * speed.per_flop, seconds),
        largest_rank(memory, layout.dim, available),
        DIRECTION_RANK,
    )
