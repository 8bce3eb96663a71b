"""What steps and updates take here, by doing a few of them.

The smallest of several times is taken, which other work on the machine disturbs least.
"""

import copy
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dome.filter import GradientFilter
from dome.samples.calls import LossCall
from dome.trackers import StreamingPower
from dome.trackers.tracker import update_all

Clock = Callable[[], float]
NUMBERS = 32_000_000  # of bases and samples in a trial: 128 MB in float32
NUM_TRIALS = 5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step on a batch of the user's.

    Attributes:
        num_samples: B.
        plain: Forward and backward.
        with_samples: The same with a filter that takes samples and has no basis.
        without: The same with a filter between two updates.
        thin: The same with directions of low rank; None if they were not asked for.
    """

    num_samples: int
    plain: float
    with_samples: float
    without: float
    thin: float | None = None


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of a basis, for one step.

    Attributes:
        update: To turn it.
        projection: To take a gradient's part in it away.
    """

    update: float
    projection: float


class NoBasis:
    """A tracker that only counts: what is left is what samples cost."""

    last_update, num_skipped, orthogonality_error = None, 0, 0.0
    effective_rank = 0.0

    def __init__(self, dim: int, rank: int) -> None:
        self.basis, self.eigenvalues = torch.zeros(dim, 0), torch.zeros(rank)
        self.num_samples = 0

    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Count the samples."""
        self.admitted(grads, scale)

    def admitted(self, grads: Sized, scale: float) -> None:
        """The same of samples in any form; none of them is looked at."""
        del scale
        self.num_samples = len(grads)

    def look(self, H: object) -> None:
        """Never called: a tracker with this method is given samples as they are."""

    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """The gradient as it is."""
        del strength
        return gradient

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: object) -> None:
        """Nothing."""


def time_steps(
    model: nn.Module,
    call: LossCall,
    samples_in: Sequence[str] | None,
    clock: Clock,
    thin: tuple[int, int] | None = None,
) -> StepTimes:
    """Time steps on a batch with a copy of the model, which is left as it is.

    Args:
        model: The model.
        call: The batch, and its loss.
        samples_in: Which inputs hold samples.
        clock: Seconds, from anywhere.
        thin: Number and rank of directions of low rank to be timed, too.
    """
    model = copy.deepcopy(model)
    devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
    with torch.random.fork_rng([d.index for d in devices if d.index is not None]):
        plain = _least(_stepper(model, call), clock)
        made: list[NoBasis] = []

        def count(dim: int, rank: int) -> NoBasis:
            made.append(NoBasis(dim, rank))
            return made[-1]

        times = []
        for every in (1, 10**9):
            with GradientFilter(
                model, 1, tracker=count, update_every=every, samples_in=samples_in
            ) as seen:
                step = _stepper(model, call, seen)
                step()  # the first compares samples with the gradient
                times.append(_least(step, clock))
        num = made[0].num_samples
        if thin is not None:
            times.append(_time_thin(model, call, samples_in, clock, thin, num))
    return StepTimes(num, plain, *times)


def _time_thin(
    model: nn.Module,
    call: LossCall,
    samples_in: Sequence[str] | None,
    clock: Clock,
    thin: tuple[int, int],
    num_samples: int,
) -> float:
    rank, direction_rank = thin
    with GradientFilter(
        model, rank, direction_rank=direction_rank, samples_in=samples_in
    ) as seen:
        step = _stepper(model, call, seen)
        for _ in range(_updates_to_settle(rank, num_samples)):
            step()
            _shake(model)
        return _least(step, clock)


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Move the weights a little: a batch has other samples then."""
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.01 * float(p.abs().mean()))


def _updates_to_settle(rank: int, batch_size: int) -> int:
    """Until samples have determined all directions, an update takes another path."""
    return -(-rank // max(batch_size - 1, 1)) + 1


def time_updates(
    dims: Sequence[int],
    rank: int,
    batch_size: int,
    device: torch.device,
    clock: Clock,
) -> UpdateTimes:
    """Time updates of a basis in float32 for each block, with random samples.

    Of blocks that are too large a part is timed, and the time is scaled.

    Args:
        dims: Numbers D of each block.
        rank: K; of a smaller block its size.
        batch_size: B.
        device: Where they lie.
        clock: Seconds, from anywhere.
    """
    B = max(batch_size, 2)
    numbers = sum(dim * (min(rank, dim) + B) for dim in dims)
    share = min(1.0, NUMBERS / numbers)
    sizes = [max(min(rank, dim), round(share * dim)) for dim in dims]
    trackers = [
        StreamingPower(size, min(rank, dim), device=device)
        for size, dim in zip(sizes, dims, strict=True)
    ]
    stream = _random_samples(sizes, B, device)

    for _ in range(_updates_to_settle(rank, B)):
        update_all(trackers, next(stream), 1.0)

    samples = next(stream)
    gradients = [rows[0] for rows in samples]

    def update() -> None:
        update_all(trackers, samples, 1.0)
        _wait(device)

    def project() -> None:
        for tracker, gradient in zip(trackers, gradients, strict=True):
            tracker.project_out(gradient)
        _wait(device)

    scale = numbers / sum(
        size * (min(rank, dim) + B) for size, dim in zip(sizes, dims, strict=True)
    )
    return UpdateTimes(scale * _least(update, clock), scale * _least(project, clock))


def _random_samples(
    sizes: Sequence[int], batch_size: int, device: torch.device
) -> Iterator[list[Tensor]]:
    random = torch.Generator(device).manual_seed(0)
    while True:
        G = torch.randn(batch_size, sum(sizes), generator=random, device=device)
        yield list(G.split(list(sizes), dim=1))


def _stepper(
    model: nn.Module, call: LossCall, grad_filter: GradientFilter | None = None
) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        call.loss(model).backward()
        if grad_filter is not None:
            grad_filter.step()
        _wait(parameters[0].device)

    return step


def _least(work: Callable[[], None], clock: Clock) -> float:
    work()
    times = []
    for _ in range(NUM_TRIALS):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
