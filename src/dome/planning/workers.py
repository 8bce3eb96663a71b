"""``plan_workers``: what the filter costs across workers, before there are any.

Letters: D parameters, K directions, B samples of a worker, P workers. Bytes are what a
worker sends in a step, as ``dome.distributed`` counts them; times are bytes over the
network's speed and flops over the device's, which are arguments. Nothing is measured.
"""

from dataclasses import dataclass
from functools import partial

from dome.planning.memory import FLOAT, SMALL, filter_memory, largest_rank
from dome.planning.training import update_flops
from dome.planning.units import size
from dome.trackers.power import is_pairwise

STATE = 16  # bytes a parameter of plain training: itself, gradient, two moments
NUM_COLLECTIVES = {"worker": 5, "per_sample": 5, "fully_shard": 6, "compressed": 2}
FULLY_SHARD = "fully_shard: "


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the workers, all alike.

    Attributes:
        memory: Bytes it has.
        bandwidth: Bytes a second that it sends to others.
        latency: Seconds that a collective takes however little it sends.
        speed: Flops a second of large matrix products, in float32.
    """

    memory: float = 80e9
    bandwidth: float = 25e9
    latency: float = 50e-6
    speed: float = 50e12


@dataclass(frozen=True, slots=True)
class WorkersChoice:
    """One way to run the filter across workers.

    Attributes:
        name: What to pass to ``dome.distributed.attach``.
        itemsize: Bytes of a number of the basis.
        memory: Bytes a worker, beyond those of plain training.
        bytes_sent: By a worker in a step; FSDP2 gathers parameters besides.
        share_of_ddp: The same over what DDP's all-reduce sends.
        seconds: Of sending and of the update, for one step.
        largest_rank: The most directions that fit, 0 if none do.
        fits: Whether the rank asked for does.
    """

    name: str
    itemsize: int
    memory: float
    bytes_sent: float
    share_of_ddp: float
    seconds: float
    largest_rank: int
    fits: bool


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """Predicted cost of every choice, exact ones first.

    Attributes:
        dim: Parameters D.
        rank: Directions K.
        batch_size: Samples B of a worker.
        num_workers: P.
        training_memory: Bytes that plain training takes on every worker.
        available: Bytes left for the filter.
        ddp_bytes: What DDP's ring all-reduce sends from a worker in a step.
        ddp_seconds: What that takes.
        choices: The ways to run the filter.
    """

    dim: int
    rank: int
    batch_size: int
    num_workers: int
    training_memory: float
    available: float
    ddp_bytes: float
    ddp_seconds: float
    choices: tuple[WorkersChoice, ...]

    @property
    def suggestion(self) -> str:
        """What to do, in words."""
        for choice in self.choices:
            if choice.fits:
                return _call(self.rank, choice.name)
        best = max(self.choices, key=lambda choice: choice.largest_rank)
        if best.largest_rank:
            call = _call(best.largest_rank, best.name)
            return f"nothing fits at rank {self.rank}: {call} would"
        if self.available <= 0:
            return (
                f"plain training alone takes {size(self.training_memory)} per worker "
                f"and does not fit: split the model over more workers by fully_shard"
            )
        return "nothing fits: use fewer samples per worker, or more workers"

    def __str__(self) -> str:
        lines = [
            f"{self.dim:,} parameters, rank {self.rank}, {self.num_workers} workers, "
            f"{self.batch_size} samples each; plain training takes "
            f"{size(self.training_memory)} per worker, "
            f"{size(max(0.0, self.available))} are left; "
            f"DDP sends {size(self.ddp_bytes)} a step "
            f"({self.ddp_seconds * 1e3:,.1f} ms)",
            f"{'way':<60}{'memory':>10}{'sent':>10}{'of DDP':>9}{'time':>12}"
            f"{'most rank':>11}",
        ]
        for choice in self.choices:
            verdict = "" if choice.fits else "  does not fit"
            lines.append(
                f"{choice.name:<60}{size(choice.memory):>10}"
                f"{size(choice.bytes_sent):>10}{choice.share_of_ddp:>8.3f}x"
                f"{choice.seconds * 1e3:>9,.1f} ms{choice.largest_rank:>11,}{verdict}"
            )
        return "\n".join([*lines, self.suggestion])


@dataclass(frozen=True, slots=True)
class _Problem:
    dim: int
    batch_size: int
    num_workers: int
    rate: float

    def ring(self, num_bytes: float) -> float:
        """Sent by a worker in a ring all-reduce."""
        return 2 * (self.num_workers - 1) / self.num_workers * num_bytes

    def memory(self, way: str, rank: int, itemsize: int) -> float:
        """Bytes a worker holds at once, beside those of plain training."""
        D, B, P = self.dim, self.batch_size, self.num_workers
        if way == "compressed":
            return filter_memory([D], rank, B, itemsize)
        if way == "fully_shard":
            # Every worker's row of the numbers held here; their gradient and result.
            return D * rank * itemsize / P + D * FLOAT + 2 * D * FLOAT / P
        rows = 1 if way == "worker" else B
        # A worker's rows, the same packed, those that arrive; gradient and result.
        moving = 3 * rows * D * FLOAT + 2 * D * FLOAT
        return D * rank * itemsize / P + moving

    def bytes_sent(self, way: str, rank: int) -> float:
        """By a worker in a step."""
        D, B, P, K = self.dim, self.batch_size, self.num_workers, rank
        one_way = (P - 1) / P * D * FLOAT
        if way == "compressed":
            return self.ring(D * FLOAT / self.rate)
        samples = P * B if way == "per_sample" else P
        numbers = samples * (K + 1)  # G U and the norms of samples
        if is_pairwise(K, samples):
            numbers += samples**2  # H Hᵀ
        else:
            numbers += K * K + samples * (K + 1)  # UᵀU, and G U again
        small = self.ring(SMALL * numbers)
        if way == "fully_shard":
            return one_way + small
        if way == "worker":
            return 2 * one_way + small
        return one_way * (B + 1) + small

    def flops(self, way: str, rank: int, itemsize: int) -> float:
        """Of a worker, for update and projection."""
        D, B, P = self.dim, self.batch_size, self.num_workers
        if way == "compressed":
            return update_flops(D, rank, B, itemsize)
        samples = P * B if way == "per_sample" else P
        return update_flops(D, rank, samples, itemsize) / P

    def training_memory(self, way: str) -> float:
        """Bytes a worker of plain training; FSDP2 has whole layers besides."""
        return STATE * self.dim / (self.num_workers if way == "fully_shard" else 1)


def plan_workers(
    dim: int,
    rank: int,
    batch_size: int,
    num_workers: int,
    *,
    rate: float = 1000,
    machine: Machine | None = None,
) -> WorkersPlan:
    """Predict memory, traffic and time of the filter across workers.

    Args:
        dim: Parameters D of the model.
        rank: Number of directions K.
        batch_size: Samples B of each worker in a step.
        num_workers: P.
        rate: Of a linear compressor, for the choices with one.
        machine: What a worker can do; one accelerator of 80 GB if not given.
    """
    for name, value in (("batch_size", batch_size), ("num_workers", num_workers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= rank <= dim:
        raise ValueError(f"rank must be between 1 and {dim}, got {rank}")
    machine = Machine() if machine is None else machine
    problem = _Problem(dim, batch_size, num_workers, rate)
    ddp = problem.ring(dim * FLOAT)
    ways = {
        "worker": 'samples="worker"',
        "per_sample": 'samples="per_sample"',
        "fully_shard": f'{FULLY_SHARD}samples="worker"',
        "compressed": f"HadamardSketch({rate:g})",
    }
    choices = [
        _choice(problem, way, words + storage, rank, itemsize, machine)
        for way, words in ways.items()
        for itemsize, storage in ((4, ""), (2, ", basis_dtype=torch.bfloat16"))
    ]
    return WorkersPlan(
        dim=dim,
        rank=rank,
        batch_size=batch_size,
        num_workers=num_workers,
        training_memory=STATE * dim,
        available=machine.memory - STATE * dim,
        ddp_bytes=ddp,
        ddp_seconds=ddp / machine.bandwidth,
        choices=tuple(choices),
    )


def _choice(
    problem: _Problem,
    way: str,
    name: str,
    rank: int,
    itemsize: int,
    machine: Machine,
) -> WorkersChoice:
    memory = partial(problem.memory, way, itemsize=itemsize)
    available = machine.memory - problem.training_memory(way)
    sent, ddp = problem.bytes_sent(way, rank), problem.ring(problem.dim * FLOAT)
    flops = problem.flops(way, rank, itemsize)
    seconds = sent / machine.bandwidth + flops / machine.speed
    if problem.num_workers > 1:
        seconds += NUM_COLLECTIVES[way] * machine.latency
    return WorkersChoice(
        name=name,
        itemsize=itemsize,
        memory=memory(rank),
        bytes_sent=sent,
        share_of_ddp=sent / ddp if ddp else 0.0,
        seconds=seconds,
        largest_rank=largest_rank(memory, problem.dim, available),
        fits=memory(rank) <= available,
    )


def _call(rank: int, name: str) -> str:
    """What to call for a choice of this name."""
    options = name.removeprefix(FULLY_SHARD)
    call = f"attach(model, optimizer, rank={rank}, {options})"
    return call if options == name else f"fully_shard(model), then {call}"
