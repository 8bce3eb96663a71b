"""What workers tell each other: their options once, and a few integers at each step."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.distributed.workers import Workers
from dome.masks import Masks
from dome.options import FilterOptions, described
from dome.parameters import Layout

FLAGS = 62  # parameters whose flags fit an integer


@dataclass(frozen=True, slots=True)
class Handshake:
    """What one worker has at a step.

    Attributes:
        step: Steps it has taken.
        num_rows: Samples it has captured.
        adds_up: Whether these are all of its gradient, which no mask changes.
        refused: Whether its gradient cannot be used.
    """

    step: int
    num_rows: int = 0
    adds_up: bool = False
    refused: bool = False


def shake_hands(
    workers: Workers,
    mine: Handshake,
    layout: Layout | None = None,
    masks: Masks | None = None,
) -> list[Handshake]:
    """The handshakes of all workers; raises on each if they are at different steps.

    Args:
        workers: All of them.
        mine: This worker's.
        layout: These parameters get a ``.grad`` of zeros if only others have one.
        masks: Hold what is news to any worker's from here on.
    """
    parameters = () if layout is None else layout.parameters
    flags = _packed([p.grad is not None for p in parameters])
    masked = masks is not None and masks.has_news()
    # What a mask takes out is still in the samples, however little it is.
    whole = mine.adds_up and not masked and (masks is None or masks.held is None)
    state = whole + 2 * mine.refused + 4 * masked
    table = workers.table([mine.step, mine.num_rows, state, *flags])
    steps = [step for step, *_ in table]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"workers are at different steps, rank by rank {steps}: every worker must "
            f"call optimizer.step() equally often, and load the same checkpoint"
        )
    if masks is not None and any(state & 4 for _, _, state, *_ in table):
        masks.share(workers.unite_)
    for i, p in enumerate(parameters):
        word, bit = 3 + i // FLAGS, i % FLAGS
        if p.grad is None and any(other[word] >> bit & 1 for other in table):
            p.grad = torch.zeros_like(p)
    return [
        Handshake(step, num_rows, bool(state & 1), bool(state & 2))
        for step, num_rows, state, *_ in table
    ]


def _packed(flags: Sequence[bool]) -> list[int]:
    """Flags as the bits of integers."""
    return [
        sum(flag << i for i, flag in enumerate(flags[start : start + FLAGS]))
        for start in range(0, len(flags), FLAGS)
    ]


@torch.no_grad()
def adds_up(total: Tensor, gradient: Tensor) -> bool:
    """Whether the sum of captured rows (D,) is all of a gradient, up to rounding."""
    if total.dtype != gradient.dtype:
        return False
    difference = total - gradient
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
