"""What ``stream=True`` costs, in time and memory.

    python benchmarks/streams.py [--batch-size 64] [--rank 10] [--rounds 3]
        [--without-kept]

ResNet-18 on 64x64 images: a plain step, a filtered one whose rows are kept, and one
with ``stream=True``. Steps take turns, the least time of each counts. The peak of each
is measured in a process of its own. ``--without-kept`` where B · D rows do not fit.
"""

import argparse
import time

import dome
from dome_lab.bench.memory import TIDY_MALLOC, in_fresh_process, peak_memory
from dome_lab.bench.training import Loop

KINDS = ("plain", "kept", "streamed")
PEAK_STEPS = 2


def loop_of(kind: str, batch_size: int, rank: int) -> Loop:
    """A training loop of one of the kinds."""
    loop = Loop("resnet18", batch_size, 2)
    if kind != "plain":
        options = {"layout": "layerwise", "stream": kind == "streamed"}
        dome.attach(loop.model, loop.optimizer, rank, **options)
    return loop


def peak_of(kind: str, batch_size: int, rank: int) -> int:
    """The most bytes of a process that trains so."""
    loop = loop_of(kind, batch_size, rank)
    for _ in range(PEAK_STEPS):
        loop.step()
    return peak_memory()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-kept", action="store_true")
    args = parser.parse_args()
    setting = (args.batch_size, args.rank)
    kinds = [kind for kind in KINDS if kind != "kept" or not args.without_kept]
    names = ("batch_size", "rank")
    peaks = {
        kind: in_fresh_process(
            "streams",
            "peak_of",
            TIDY_MALLOC | {"PYTHONPATH": "benchmarks:src"},
            kind=kind,
            **dict(zip(names, setting, strict=True)),
        )
        for kind in kinds
    }
    loops = {kind: loop_of(kind, *setting) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(args.rounds + 1):
        for kind, loop in loops.items():
            start = time.perf_counter()
            loop.step()
            if number:  # the first makes what torch keeps for good
                times[kind].append(time.perf_counter() - start)
    plain = min(times["plain"])
    for kind in kinds:
        seconds = min(times[kind])
        print(
            f"{kind:<10}{seconds:8.3f} s {seconds / plain:6.2f} plain steps"
            f"{peaks[kind] / 1e9:8.2f} GB"
        )


if __name__ == "__main__":
    main()
