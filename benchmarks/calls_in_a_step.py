"""How many calls, files and changes of file there are in one filtered step.

    python benchmarks/calls_in_a_step.py [--list "mlp: plain"]

A measure of how far one has to read: what is called in the files of ``dome`` from
``model(x)`` to the end of ``optimizer.step()``, after enough steps that the samples
have determined all directions. A change of file is a call whose file is not that of the
call before it. Every time that a generator goes on counts as a call, and so does a
comprehension where Python makes it a function. The last row is one update of a tracker.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome

ROOT = Path(dome.__file__).parent
WARM_STEPS = 25  # the first ones also build what later ones find
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer-wise": {"layout": "layerwise"},
    "svd": {"tracker": "svd"},
    "micro-batches": {"samples": "microbatch"},
    "direction_rank=2": {"direction_rank": 2},
    "streamed by layers": {"stream": True, "layout": "layerwise"},
}
SHAPES = {"mlp": (16, 20), "conv": (16, 3, 8, 8)}

Call = tuple[str, str]  # file and function


class Profile:
    """Calls of functions of dome, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """What ``sys.setprofile`` calls."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            self.calls.append((name, frame.f_code.co_qualname))


def profiled(step: Callable[[], None]) -> list[Call]:
    """The calls of a step, once it is as later ones are."""
    for _ in range(WARM_STEPS):
        step()
    profile = Profile()
    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    return profile.calls


def model_named(name: str) -> nn.Module:
    """A small network."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    features = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()
    head = nn.Linear(8 * 64, 64), nn.ReLU(), nn.Linear(64, 5)
    return nn.Sequential(*features, nn.Flatten(), *head)


def filtered_step(name: str, **options: Any) -> Callable[[], None]:  # noqa: ANN401
    """A training step of a small network with the filter."""
    generator = torch.Generator().manual_seed(0)
    model = model_named(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dome.attach(model, optimizer, rank=4, **options)

    def step() -> None:
        x = torch.randn(SHAPES[name], generator=generator)
        y = torch.randint(5, (len(x),), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def one_update() -> Callable[[], None]:
    """An update of the paper's tracker alone."""
    tracker = dome.StreamingPower(2000, 10)
    generator = torch.Generator().manual_seed(0)
    return lambda: tracker.update(torch.randn(16, 2000, generator=generator))


def main() -> None:
    """Print a row for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", help="all calls of this row, by file")
    wanted = parser.parse_args().list
    steps = {
        f"{name}: {variant}": filtered_step(name, **options)
        for name in SHAPES
        for variant, options in VARIANTS.items()
    }
    print(f"{'':28}{'calls':>8}{'files':>8}{'changes':>8}")
    for row, step in (steps | {"one update": one_update()}).items():
        calls = profiled(step)
        files = [file for file, _ in calls]
        changes = sum(a != b for a, b in pairwise(files))
        print(f"{row:28}{len(calls):8}{len(set(files)):8}{changes:8}")
        if row == wanted:
            for (file, function), number in Counter(calls).items():
                print(f"{number:8} {file} {function}")


if __name__ == "__main__":
    main()
