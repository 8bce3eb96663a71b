"""The one training loop of the experiments.

Two runs of one seed that differ in nothing but the filter have the same initial
weights, the same order of samples and the same sketch noise: every stream of random
numbers has a generator of its own, and the global generator is left as it was.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import dome
from dome.compression import GaussianSketch
from dome.layout import Layout
from dome.paper.rows import Row
from dome.paper.tasks.task import Task

PLAIN, FILTERED = "plain", "filtered"
RUN_KEY = ("seed", "arm", "rate")  # the columns that name a run
_INIT, _ORDER, _SKETCH, _BASIS = range(4)  # the streams of random numbers of a seed

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What sets one run apart.

    Attributes:
        seed: Of initial weights, sample order, sketch noise and first basis.
        rank: Directions the filter removes; None trains without the filter.
        rate: How many times fewer numbers the sketch keeps; None does not compress.
        epochs: Passes over the training samples; a short last batch is left out.
        batch_size: Samples a step.
    """

    seed: int
    rank: int | None
    rate: float | None
    epochs: int
    batch_size: int

    @property
    def arm(self) -> str:
        """Which side of the comparison the run is on."""
        return PLAIN if self.rank is None else FILTERED


def train(
    task: Task, make_model: MakeModel, make_optimizer: MakeOptimizer, run: Run
) -> Iterator[Row]:
    """Train once and yield a row an epoch, loss and accuracy measured on all samples.

    Args:
        task: What to learn.
        make_model: Builds the network; may draw from the global generator.
        make_optimizer: Builds the optimizer for these parameters.
        run: Seed, arm and length.
    """
    model = _initial_model(make_model, run.seed)
    optimizer = make_optimizer(model.parameters())
    grad_filter = _prepare(model, optimizer, run)
    order = _generator(run.seed, _ORDER)
    for epoch in range(1, run.epochs + 1):
        started = time.perf_counter()
        losses, kept, fractions = [], [], []
        for x, y in _batches(task, run.batch_size, order):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if grad_filter is not None:
                kept.append(float(grad_filter.stats.kept_norm))
                fractions.append(float(grad_filter.stats.fraction))
        seconds = time.perf_counter() - started
        test_loss, test_accuracy = evaluate(model, task.test_x, task.test_y)
        yield Row(
            seed=run.seed,
            arm=run.arm,
            rate=run.rate,
            epoch=epoch,
            train_loss=_mean(losses),
            test_accuracy=test_accuracy,
            test_loss=test_loss,
            kept_norm=_mean(kept) if kept else 1.0,
            fraction=_mean(fractions) if fractions else None,
            seconds=seconds,
        )
    if grad_filter is not None:
        grad_filter.detach()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and share of right answers on samples x (N, ...), y (N,)."""
    was_training = model.training
    model.eval()
    output = torch.cat([model(part) for part in x.split(1024)])
    model.train(was_training)
    right = output.argmax(dim=1) == y
    return float(cross_entropy(output, y)), float(right.double().mean())


def _prepare(
    model: nn.Module, optimizer: Optimizer, run: Run
) -> dome.GradientFilter | None:
    """Put filter and sketch, as the run wants them, before every optimizer step."""
    noise = _generator(run.seed, _SKETCH)
    sketch = None if run.rate is None else GaussianSketch(run.rate, generator=noise)
    if run.rank is not None:
        after = () if sketch is None else (sketch,)
        basis = _generator(run.seed, _BASIS)
        return dome.attach(model, optimizer, run.rank, after=after, generator=basis)
    if sketch is not None:
        layout = Layout(model)
        optimizer.register_step_pre_hook(
            lambda *_: layout.scatter_(sketch(layout.gather()))
        )
    return None


def _initial_model(make_model: MakeModel, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_generator(seed, _INIT).initial_seed())
        return make_model()


def _batches(
    task: Task, batch_size: int, order: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    num_steps = len(task.train_x) // batch_size
    if num_steps == 0:
        raise ValueError(
            f"batch_size {batch_size} is more than the {len(task.train_x)} training "
            f"samples of {task.name}: choose a smaller one"
        )
    shuffled = torch.randperm(len(task.train_x), generator=order)
    for batch in shuffled[: num_steps * batch_size].split(batch_size):
        yield task.train_x[batch], task.train_y[batch]


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * stream + seed)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
