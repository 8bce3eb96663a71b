"""What each habit of ``dome.numerics.cpu`` gains in a filtered step.

    python benchmarks/cpu_habits.py [--rank 100] [--rounds 60] [--threads 2 1]
        [--update-every 10] [--busy]

Filtered training loops take turns in one process, each with one habit replaced by what
one would write without knowing the CPU. A row says by how much the step then takes
longer: the median over rounds of its time over that of the step as it is in the same
round; on two threads and on one. What gains less than a twentieth of a step at B = 16
and at B = 128 should go. With ``--busy``, seconds that the main thread was running:
other processes hardly change these, and OMP_WAIT_POLICY=passive keeps waits out. What
threads lose by waiting for each other, or for each other's caches, is not in them.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from dome.numerics import cpu, passes
from dome_lab.bench.training import filtered_loop, updates_to_settle


def plain_product(wide: Tensor, tall: Tensor) -> Tensor:
    """A C in one call."""
    return (wide @ tall).double()


def plain_subtraction(vector: Tensor, S: Tensor, c: Tensor) -> None:
    """v − S c in one call."""
    vector.sub_(S @ c)


# What is replaced, and by what.
HABITS: dict[str, tuple[object, str, object]] = {
    "products by pieces": (passes, "sum_of_pieces", plain_product),
    "Uᵀg as a bag": (cpu, "weighted_rows", passes.sum_of_pieces),
    "U c by pieces": (cpu, "subtract_", plain_subtraction),
    "long blocks to read": (cpu, "VIEW_ROWS", 4096),
}


@contextmanager
def without(habit: str | None) -> Iterator[None]:
    """Replace a habit by the plain product for a while."""
    if habit is None:
        yield
        return
    owner, name, plain = HABITS[habit]
    tuned = getattr(owner, name)
    setattr(owner, name, plain)
    try:
        yield
    finally:
        setattr(owner, name, tuned)


def measure(
    batch_size: int,
    rank: int,
    num_rounds: int,
    clock: Callable[[], float],
    update_every: int,
) -> dict[str | None, tuple[float, float]]:
    """Seconds of a filtered step without each habit, and over those as it is."""
    variants = [None, *HABITS]
    loops = {
        v: filtered_loop("resnet8", batch_size, rank, update_every=update_every)
        for v in variants
    }
    taken: dict[str | None, list[float]] = {v: [] for v in variants}
    warm = updates_to_settle(batch_size, rank)
    for number in range(warm + num_rounds):
        for variant, loop in loops.items():
            with without(variant):
                start = clock()
                loop.step()
                if number >= warm:
                    taken[variant].append(clock() - start)
    return {
        variant: (
            median(seconds),
            median(a / b for a, b in zip(seconds, taken[None], strict=True)),
        )
        for variant, seconds in taken.items()
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--update-every", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    clock = time.thread_time if options.busy else time.perf_counter
    print(f"{'without':<28}{'threads':>8}{'B':>6}{'step':>10}{'longer by':>11}")
    for num_threads in options.threads:
        torch.set_num_threads(num_threads)
        for batch_size in (16, 128):
            rounds = options.rounds if batch_size == 16 else options.rounds // 2
            steps = measure(
                batch_size, options.rank, rounds, clock, options.update_every
            )
            for habit, (seconds, ratio) in steps.items():
                print(
                    f"{habit or 'nothing':<28}{num_threads:>8}{batch_size:>6}"
                    f"{1e3 * seconds:>8.1f}ms{100 * (ratio - 1):>9.1f} %"
                )


if __name__ == "__main__":
    main()
