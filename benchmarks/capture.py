"""What capturing per-sample gradients costs here, against another checkout of dome.

    python benchmarks/capture.py ../dome-before [--rounds 8] [--starts 4]

Forward pass, ``backward()`` and taking the rows, without a filter: of this checkout, of
the other one, and of neither (plain). Each side is a process of its own with one thread
and takes a few steps in turn, so that a host of several speeds is equally kind to all.
Processes are started anew a few times, because where their memory lies makes a step
some per cent faster or slower. A ratio is that of the medians of one round; printed
are the median of the rounds and their quartiles, and the ratio of the fastest steps.

The other checkout may be as old as version 0.1.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HERE = Path(__file__).resolve().parents[1]
CASES = [(model, batch) for model in ("resnet8", "transformer") for batch in (16, 128)]
STEPS = {16: 12, 128: 4}  # in a turn
VOCABULARY = 1000  # an embedding of 20,000 words would hide everything else


def _first(*names: str) -> object:
    """What the first of these modules that exist holds under the name behind it."""
    for name in names:
        module, _, attribute = name.partition(":")
        package, *inner = module.split(".")
        path = [package, *inner]
        found = all(
            find_spec(".".join(path[: i + 1])) is not None for i in range(len(path))
        )
        if found:
            return getattr(import_module(module), attribute)
    raise ImportError(f"none of {names}")


def _case(model_name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch, the same on every side."""
    torch.manual_seed(0)
    y = torch.randint(10, (batch,))
    if model_name == "resnet8":
        build = _first(
            "dome_lab.paper.models:resnet8", "dome_lab.paper.models.resnet8:resnet8"
        )
        return build(), torch.randn(batch, 3, 32, 32), y
    build = _first(
        "dome_lab.paper.models:Transformer",
        "dome_lab.paper.models.transformer:Transformer",
    )
    return build(VOCABULARY, 10), torch.randint(VOCABULARY, (batch, 64)), y


def _step(kind: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One forward and backward pass, and the rows taken if there are any."""
    if kind == "plain":
        take = None
    else:
        layout = _first("dome.parameters:Layout", "dome.layout:Layout")
        source = _first(
            "dome.samples.per_sample:PerSample",
            "dome.samples.capture:PerSample",
        )
        take = source(model, layout(model)).take

    def step() -> None:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        if take is not None and take().shape[0] != len(x):
            raise RuntimeError("one row for each sample was expected")

    return step


def serve(kind: str, clock: Callable[[], float]) -> None:
    """Answer requests ``model batch number`` by the seconds of so many steps."""
    torch.set_num_threads(1)
    ready: dict[tuple[str, int], Callable[[], None]] = {}
    for line in sys.stdin:
        model_name, batch, number = line.split()
        case = (model_name, int(batch))
        if case not in ready:
            ready[case] = _step(kind, *_case(*case))
            for _ in range(3):
                ready[case]()
        seconds = []
        for _ in range(int(number)):
            start = clock()
            ready[case]()
            seconds.append(clock() - start)
        print(*seconds, flush=True)


class Side:
    """A process that takes steps when it is asked to.

    Args:
        kind: "plain" or "captured".
        tree: The checkout whose code it runs.
        busy: Whether other work on this machine is not to count.
    """

    def __init__(self, kind: str, tree: Path, busy: bool) -> None:
        command = [sys.executable, __file__, str(tree), "--serve", kind]
        self._process = subprocess.Popen(
            [*command, "--busy"] if busy else command,
            env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, model_name: str, batch: int, number: int) -> list[float]:
        """The times of so many steps."""
        print(model_name, batch, number, file=self._process.stdin, flush=True)
        return [float(word) for word in self._process.stdout.readline().split()]

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


Round = dict[str, list[float]]


def _round(sides: dict[str, Side], model_name: str, batch: int, number: int) -> Round:
    """The times of a few steps of each side, in an order that changes."""
    order = list(sides) if number % 2 else list(sides)[::-1]
    return {
        name: sides[name].seconds(model_name, batch, STEPS[batch]) for name in order
    }


def _ratio(middle: dict[str, list[float]], a: str, b: str) -> str:
    pairs = zip(middle[a], middle[b], strict=True)
    low, half, high = statistics.quantiles([x / y for x, y in pairs], n=4)
    return f"{half:.3f} ({low:.3f} - {high:.3f})"


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout of dome")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument(
        "--busy", action="store_true", help="seconds of a processor, not of the clock"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, time.process_time if options.busy else time.perf_counter)
        return
    cases = [case for case in CASES if options.only in f"{case[0]} {case[1]}"]
    rounds: dict[tuple[str, int], list[Round]] = {case: [] for case in cases}
    for _ in range(options.starts):
        sides = {
            "other": Side("captured", options.other.resolve(), options.busy),
            "here": Side("captured", HERE, options.busy),
            "plain": Side("plain", HERE, options.busy),
        }
        for case in cases:
            rounds[case] += [_round(sides, *case, n) for n in range(options.rounds)]
        for side in sides.values():
            side.stop()
    print("| | here / other | fastest | here / plain | other / plain | plain |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for (model_name, batch), found in rounds.items():
        middle = {
            name: [statistics.median(r[name]) for r in found] for name in found[0]
        }
        least = {name: min(min(r[name]) for r in found) for name in found[0]}
        print(
            f"| {model_name}, B = {batch} | {_ratio(middle, 'here', 'other')} "
            f"| {least['here'] / least['other']:.3f} "
            f"| {_ratio(middle, 'here', 'plain')} | {_ratio(middle, 'other', 'plain')} "
            f"| {1e3 * statistics.median(middle['plain']):.1f} ms |"
        )


if __name__ == "__main__":
    main()
