"""What workers tell each other at the beginning of a step: a few integers each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.distributed.workers import Workers
from dome.parameters import Layout

FLAGS = 62  # parameters whose flags fit an integer


@dataclass(frozen=True, slots=True)
class Greeting:
    """What one worker has at a step.

    Attributes:
        step: Steps it has taken.
        num_rows: Samples it has captured.
        adds_up: Whether these are all of its gradient.
        refused: Whether its gradient cannot be encoded.
        has_gradient: For each parameter, whether it has a ``.grad``.
    """

    step: int
    num_rows: int
    adds_up: bool
    refused: bool
    has_gradient: tuple[bool, ...]

    def to_numbers(self) -> list[int]:
        """As integers."""
        flags = [
            sum(flag << i for i, flag in enumerate(self.has_gradient[start:][:FLAGS]))
            for start in range(0, len(self.has_gradient), FLAGS)
        ]
        return [self.step, self.num_rows, self.adds_up + 2 * self.refused, *flags]

    @staticmethod
    def from_numbers(numbers: Sequence[int], num_parameters: int) -> "Greeting":
        """Back from integers."""
        step, num_rows, state, *flags = numbers
        has = (flags[i // FLAGS] >> i % FLAGS & 1 for i in range(num_parameters))
        return Greeting(
            step, num_rows, bool(state & 1), bool(state & 2), tuple(map(bool, has))
        )


def has_gradient(layout: Layout) -> tuple[bool, ...]:
    """For each parameter, whether it has a ``.grad``."""
    return tuple(p.grad is not None for p in layout.parameters)


def greet(workers: Workers, mine: Greeting) -> list[Greeting]:
    """The greetings of all workers; raises on each if they are at different steps."""
    num = len(mine.has_gradient)
    table = workers.table(mine.to_numbers())
    everyone = [Greeting.from_numbers(row, num) for row in table]
    steps = [greeting.step for greeting in everyone]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"workers are at different steps, rank by rank {steps}: every worker must "
            f"call optimizer.step() equally often, and load the same checkpoint"
        )
    return everyone


def make_room(layout: Layout, everyone: Sequence[Greeting]) -> None:
    """Give parameters a ``.grad`` of zeros where only other workers have one."""
    for i, p in enumerate(layout.parameters):
        if p.grad is None and any(greeting.has_gradient[i] for greeting in everyone):
            p.grad = torch.zeros_like(p)


def sample_counts(everyone: Sequence[Greeting]) -> list[int]:
    """Samples of each worker."""
    return [greeting.num_rows for greeting in everyone]


def nothing_but(rows: Tensor | None, gradient: Tensor) -> bool:
    """Whether a worker without rows has no gradient either."""
    return rows is None and not bool(gradient.any())
