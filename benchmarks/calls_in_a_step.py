"""How many calls, files and changes of file there are in one filtered step.

    python benchmarks/calls_in_a_step.py [--layout global]

A measure of how far one has to read: what is called in the files of ``dome`` from
``model(x)`` to the end of ``optimizer.step()``, for an MLP of two layers with TopK
behind the filter, after a few steps. A change of file is a call whose file is not that
of the call before it. Every time that a generator goes on counts as a call.
"""

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome

ROOT = Path(dome.__file__).parent
WARM_STEPS = 5  # the first ones also build what later ones find


class Profile:
    """Calls of functions of dome, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """What ``sys.setprofile`` calls."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            self.files.append(str(path.relative_to(ROOT)))


def main() -> None:
    """Print the counts, of each room and of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="global")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WARM_STEPS + 1, 16, 20, generator=generator)
    y = torch.randint(5, (WARM_STEPS + 1, 16), generator=generator)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = dome.compression.TopK(rate=10)
    dome.attach(model, optimizer, rank=4, layout=options.layout, after=after)

    def step(number: int) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x[number]), y[number]).backward()
        optimizer.step()

    for number in range(WARM_STEPS):
        step(number)
    profile = Profile()
    sys.setprofile(profile)
    step(WARM_STEPS)
    sys.setprofile(None)
    files = profile.files
    changes = sum(a != b for a, b in pairwise(files))
    print(f"{len(files)} calls, {len(set(files))} files, {changes} changes of file")
    rooms = Counter(name.partition("/")[0] for name in files)
    for room, number in rooms.most_common():
        own = {name for name in files if name.partition("/")[0] == room}
        print(f"{number:6} calls, {len(own):3} files   {room}")


if __name__ == "__main__":
    main()
