"""The one training loop of the experiments.

Two runs of one seed that differ in nothing but the filter have the same initial
weights, the same order of samples and the same sketch noise (``randomness.py``), and
the global generator is left as it was.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dome_lab.paper.device import training_device
from dome_lab.paper.models import MODELS
from dome_lab.paper.randomness import INITIAL_WEIGHTS, generator
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run, check_batch_size, check_name
from dome_lab.paper.tasks import TASKS, Task, load_task
from dome_lab.paper.training import Step, Training

EVALUATION_BATCH = 1024


class Keeper(Protocol):
    """What makes a run go on where it stopped (``resuming.py``)."""

    def restore(self, training: Training) -> None:
        """Put it behind the last epoch that was kept, if there is one."""

    def keep(self, training: Training, row: Row | None = None) -> None:
        """Keep its state after an epoch, with the row of that epoch if it has one."""


Tell = Callable[[int, int, int], None]  # epoch, steps of it that are done, of how many


def compute_run(
    run: Run, tell: Tell | None = None, keeper: Keeper | None = None
) -> Iterator[Row]:
    """Train once and yield a row an epoch.

    A run that diverges goes on to its last epoch; what is not a finite number then is
    None in its rows.

    Args:
        run: What to train, and how.
        tell: Is told after every step how far the epoch is.
        keeper: Keeps a state after every epoch; the epochs before the one it has are
            not computed again, and their rows not yielded.
    """
    task, model = start(run)
    under_way = Training(model, task, run)
    if keeper is not None:
        keeper.restore(under_way)
    for epoch in _epochs(under_way, tell):
        tested = evaluate(model, task.test_x, task.test_y)
        row = Row(
            **run.columns(),
            epoch=epoch.number,
            train_loss=epoch.train_loss,
            **tested,
            kept_norm=epoch.kept_norm,
            fraction=epoch.fraction,
            times_fewer_bits=epoch.times_fewer_bits,
            **epoch.subspace,
            seconds=epoch.seconds,
            processor_seconds=epoch.processor_seconds,
        )
        if keeper is not None:
            keeper.keep(under_way, row)
        yield row


def trained_model(run: Run, keeper: Keeper | None = None) -> tuple[nn.Module, Task]:
    """The model at the end of a run, where it was trained, and what it learned."""
    task, model = start(run)
    under_way = Training(model, task, run)
    if keeper is not None:
        keeper.restore(under_way)
    for _ in _epochs(under_way):
        if keeper is not None:
            keeper.keep(under_way)
    return model, task


def training(run: Run) -> tuple[nn.Module, Task, Iterator[Step]]:
    """A run to look into: the model, what it learns, and the steps that train it."""
    task, model = start(run)
    return model, task, Training(model, task, run).steps()


def load_run_task(run: Run) -> Task:
    """The samples of a run; too few for a batch are refused."""
    check_name("task", run.task, list(TASKS))
    task = load_task(
        run.task,
        num_train=run.num_train,
        num_test=run.num_test,
        num_classes=run.num_classes,
        validation=run.split == "validation",
    )
    check_batch_size(run.batch_size, len(task.train_x), run.task)
    return task


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Row:
    """Loss, accuracy and macro-F1 on samples x (N, ...), y (N,)."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    parts = [model(part.to(device)).cpu() for part in x.split(EVALUATION_BATCH)]
    model.train(was_training)
    output = torch.cat(parts)
    answers = output.argmax(dim=1)
    return {
        "test_loss": _finite(float(cross_entropy(output, y))),
        "test_accuracy": float((answers == y).double().mean()),
        "test_macro_f1": macro_f1(y, answers),
    }


def macro_f1(y: Tensor, answers: Tensor) -> float:
    """The mean of F1 = 2·hits / (true + answered) over all classes that occur.

    As scikit-learn has it, whose import takes longer than that of torch.
    """
    true, answered, hits = (
        torch.bincount(labels, minlength=int(torch.cat([y, answers]).max()) + 1)
        for labels in (y, answers, y[y == answers])
    )
    total = true + answered
    return float((2 * hits.double() / total)[total > 0].mean())


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Means over the steps of an epoch, how long they took, the subspace after it.

    Seconds by the clock depend on what else the machine does; those of the processor
    hardly.
    """

    number: int
    train_loss: float | None
    kept_norm: float | None
    fraction: float | None
    times_fewer_bits: float | None
    seconds: float
    processor_seconds: float
    subspace: Row


def start(run: Run) -> tuple[Task, nn.Module]:
    """The samples of a run, and its model before the first step."""
    check_name("model", run.model, list(MODELS))
    task = load_run_task(run)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(run.seed, INITIAL_WEIGHTS).initial_seed())
        model = MODELS[run.model](task)
    return task, model.to(training_device())


def _epochs(under_way: Training, tell: Tell | None = None) -> Iterator[_Epoch]:
    """Train the model in place, an epoch at a time."""
    num_steps = under_way.num_steps
    done: list[Step] = []
    started, worked = time.perf_counter(), time.process_time()
    for step in under_way.steps():
        done.append(step)
        if tell is not None:
            tell(step.epoch, len(done), num_steps)
        if len(done) < num_steps:
            continue
        yield _Epoch(
            step.epoch,
            _mean([step.loss for step in done]),
            _mean([step.kept_norm for step in done]),
            _mean([step.fraction for step in done]),
            step.times_fewer_bits,
            time.perf_counter() - started,
            time.process_time() - worked,
            under_way.watch.look(step.filter),
        )
        done.clear()
        started, worked = time.perf_counter(), time.process_time()


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None if there is none, or it is not finite."""
    there = [value for value in values if value is not None]
    return _finite(sum(there) / len(there)) if there else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
