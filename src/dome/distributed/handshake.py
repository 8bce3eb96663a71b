"""What workers tell each other at the beginning of a step: a few integers each."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.distributed.workers import Workers
from dome.options import FilterOptions, described
from dome.parameters import Layout

FLAGS = 62  # parameters whose flags fit an integer


@dataclass(frozen=True, slots=True)
class Handshake:
    """What one worker has at a step.

    Attributes:
        step: Steps it has taken.
        num_rows: Samples it has captured.
        adds_up: Whether these are all of its gradient.
        refused: Whether its gradient cannot be encoded.
        has_gradient: For each parameter, whether it has a ``.grad``.
        masked: Whether it holds entries at zero that the others may not hold.
    """

    step: int
    num_rows: int
    adds_up: bool
    refused: bool
    has_gradient: tuple[bool, ...]
    masked: bool = False

    def to_numbers(self) -> list[int]:
        """As integers."""
        flags = [
            sum(flag << i for i, flag in enumerate(self.has_gradient[start:][:FLAGS]))
            for start in range(0, len(self.has_gradient), FLAGS)
        ]
        state = self.adds_up + 2 * self.refused + 4 * self.masked
        return [self.step, self.num_rows, state, *flags]

    @staticmethod
    def from_numbers(numbers: Sequence[int], num_parameters: int) -> "Handshake":
        """Back from integers."""
        step, num_rows, state, *flags = numbers
        has = (flags[i // FLAGS] >> i % FLAGS & 1 for i in range(num_parameters))
        return Handshake(
            step,
            num_rows,
            bool(state & 1),
            bool(state & 2),
            tuple(map(bool, has)),
            bool(state & 4),
        )


def has_gradient(layout: Layout) -> tuple[bool, ...]:
    """For each parameter, whether it has a ``.grad``."""
    return tuple(p.grad is not None for p in layout.parameters)


def shake_hands(workers: Workers, mine: Handshake) -> list[Handshake]:
    """The handshakes of all workers; raises on each if they are at different steps."""
    num = len(mine.has_gradient)
    table = workers.table(mine.to_numbers())
    everyone = [Handshake.from_numbers(row, num) for row in table]
    steps = [handshake.step for handshake in everyone]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"workers are at different steps, rank by rank {steps}: every worker must "
            f"call optimizer.step() equally often, and load the same checkpoint"
        )
    return everyone


def make_room(layout: Layout, everyone: Sequence[Handshake]) -> None:
    """Give parameters a ``.grad`` of zeros where only other workers have one."""
    for i, p in enumerate(layout.parameters):
        if p.grad is None and any(handshake.has_gradient[i] for handshake in everyone):
            p.grad = torch.zeros_like(p)


def sample_counts(everyone: Sequence[Handshake]) -> list[int]:
    """Samples of each worker."""
    return [handshake.num_rows for handshake in everyone]


@torch.no_grad()
def adds_up(rows: Tensor | None, gradient: Tensor) -> bool:
    """Whether captured rows (B, D) are all of a gradient (D,), up to rounding."""
    if rows is None:
        return not bool(gradient.any())
    if rows.dtype != gradient.dtype:
        return False
    difference = rows.sum(dim=0).sub_(gradient)
    # Rounding of a sum of B rows in another order.
    limit = 4 * torch.finfo(gradient.dtype).eps * torch.linalg.vector_norm(gradient)
    return bool(torch.linalg.vector_norm(difference) <= limit)


def check_same_options(
    workers: Workers, options: FilterOptions, layout: Layout, **more: object
) -> None:
    """Refuse workers whose filters differ, on every worker, by the option's name.

    Args:
        workers: All of them.
        options: This worker's.
        layout: Which parameters it filters.
        **more: What else must be the same, by name.
    """
    words = options.described() | {n: described(value) for n, value in more.items()}
    shapes = "\n".join(f"{slot.name} {tuple(slot.shape)}" for slot in layout.slots)
    digest = f"{zlib.crc32(shapes.encode()):08x}"
    words["parameters"] = f"{layout.dim} numbers, names and shapes {digest}"
    everyone = workers.exchange_words(words)
    for name in dict.fromkeys(name for other in everyone for name in other):
        values = [other.get(name, "none") for other in everyone]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {p} has {v}" for p, v in enumerate(values))
            raise ValueError(
                f"workers have different options, {name}: {listed}. Every worker must "
                f"call dome.distributed.attach alike"
            )


def refuse_directions(options: FilterOptions) -> None:
    """Refuse directions of low rank where workers have each its own samples."""
    if options.direction_rank is not None:
        raise ValueError(
            "direction_rank is not supported with a compressor across workers, where "
            "each has a basis of its own: leave out one of the two"
        )


def refuse_stream(options: FilterOptions) -> None:
    """Refuse samples that are used in backward(): workers send theirs at the step."""
    if options.stream:
        raise ValueError(
            "stream=True is not supported across workers: leave it out, since workers "
            "send samples at the step, or train in one process"
        )
