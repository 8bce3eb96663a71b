"""What a stream of samples costs: layer by layer, and what it would cost globally.

    python benchmarks/streams.py [--batch-size 64] [--rank 10] [--rounds 3]

ResNet-18 on 64x64 images. Steps are interleaved, the least time of each counts.

- Layer-wise: a filtered step with ``stream=True`` against one without.
- Global: one basis needs rows twice, V = H U and H Hᵀ before R is known, Hᵀ M after. If
  they are not kept they must be formed again from inputs and output gradients. That
  takes what capturing takes beyond a plain step, and the weight gradients of a plain
  step besides, which capturing replaces.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

import dome
from dome.parameters import Layout
from dome.samples import PerSample
from dome_lab.bench.training import Loop


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--filters", action="store_true", help="layer-wise filters too")
    args = parser.parse_args()
    steps = {
        "plain": plain(args.batch_size),
        "inputs' gradients alone": without_weights(args.batch_size),
        "rows formed and dropped": captured(args.batch_size),
    }
    if args.filters:
        for stream in (False, True):
            name = "streamed" if stream else "kept"
            steps[f"filtered, rows {name}"] = filtered(args, stream)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:  # the first makes what torch keeps for good
                times[name].append(time.perf_counter() - start)
    least = {name: min(values) for name, values in times.items()}
    whole = least["plain"]
    for name, seconds in least.items():
        print(f"{name:<26}{seconds:8.3f} s {seconds / whole:6.2f} plain steps")
    weights = whole - least["inputs' gradients alone"]
    again = least["rows formed and dropped"] - whole + weights
    print(f"{'rows formed again':<26}{again:8.3f} s {again / whole:6.2f} plain steps")


def plain(batch_size: int) -> Callable[[], None]:
    """A step without a filter."""
    return Loop("resnet18", batch_size, 1).step


def without_weights(batch_size: int) -> Callable[[], None]:
    """A forward and backward pass in which no weight has a gradient."""
    loop = Loop("resnet18", batch_size, 1)
    loop.model.requires_grad_(False)
    x = torch.randn(batch_size, 3, 64, 64, requires_grad=True)
    y = torch.randint(200, (batch_size,))

    def step() -> None:
        x.grad = None
        cross_entropy(loop.model(x), y).backward()

    return step


def captured(batch_size: int) -> Callable[[], None]:
    """A step whose rows are formed, and used by nobody."""
    loop = Loop("resnet18", batch_size, 1)
    layout = Layout(loop.model, "layerwise")
    source = PerSample(loop.model, layout, ignore_penalty=True, use=lambda *_: None)

    def step() -> None:
        loop.step()
        source.take()

    return step


def filtered(args: argparse.Namespace, stream: bool) -> Callable[[], None]:
    """A filtered step with a basis for each layer."""
    loop = Loop("resnet18", args.batch_size, 1)
    options = {"layout": "layerwise", "stream": stream}
    dome.attach(loop.model, loop.optimizer, args.rank, **options)
    return loop.step


if __name__ == "__main__":
    main()
