"""Tasks one after the other: what is left of the first when the last is learned.

Every task of a stream is learned with the same network. "split" has two classes a task,
and the answer is looked for among these two; "permuted" has all classes, and pixels in
another order for each task.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import dome
from dome.continual import EWC
from dome_lab.paper.arms import make_optimizer
from dome_lab.paper.device import FIRST_BASIS, SAMPLE_ORDER, generator
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, Run
from dome_lab.paper.tasks import Task
from dome_lab.paper.train import start

NUM_TASKS = 5
FISHER_SAMPLES = 500
CHUNK = 100  # samples whose gradients are taken at once
DIVERGED = 1e4  # a loss beyond which there is nothing left to hold on to


@dataclass(frozen=True, slots=True)
class Stage:
    """One task of a stream: its samples, and the classes among which it is answered."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: Tensor

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy among the classes of this task; y counts within them."""
        return cross_entropy(outputs[:, self.classes], y)


def stages(task: Task, stream: str, seed: int) -> list[Stage]:
    """The tasks of a stream, in order."""
    if stream == "split":
        size = task.num_classes // NUM_TASKS
        groups = torch.arange(size * NUM_TASKS).split(size)
        return [_of_classes(task, classes) for classes in groups]
    rng = generator(seed, SAMPLE_ORDER)
    pixels = task.train_x[0].numel()
    first = torch.arange(pixels)
    later = [torch.randperm(pixels, generator=rng) for _ in range(NUM_TASKS - 1)]
    return [_permuted(task, order) for order in (first, *later)]


def compute_continual(run: Run) -> Iterator[Row]:
    """Learn task after task; yield a row when each is learned."""
    task, model = start(run)
    if run.stream is None:
        raise ValueError(f"a continual run has a stream: {run}")
    sequence = stages(task, run.stream, run.seed)
    ewc = None if run.penalty is None else EWC(model, run.penalty)
    order = generator(run.seed, SAMPLE_ORDER)
    for learned, stage in enumerate(sequence, start=1):
        started = time.perf_counter()
        # Momentum belongs to a task, and so does the basis.
        optimizer = make_optimizer(model, run)
        filtering = _filter(model, optimizer, run, ewc)
        loss = _learn(model, optimizer, stage, run, order, ewc)
        if ewc is not None and not _has_diverged(model, stage):
            _consolidate(ewc, stage, order, filtering)
        if filtering is not None:
            filtering.detach()
        scores = [_accuracy(model, other) for other in sequence]
        yield Row(
            **run.columns(),
            epoch=learned,
            train_loss=loss,
            test_accuracy=sum(scores[:learned]) / learned,
            **{f"accuracy_{i}": score for i, score in enumerate(scores, start=1)},
            num_tasks=len(sequence),
            seconds=time.perf_counter() - started,
        )


def _filter(
    model: nn.Module, optimizer: Optimizer, run: Run, ewc: EWC | None
) -> dome.GradientFilter | None:
    """The filter of a task; the penalty's gradient is added behind it."""
    if run.arm != FILTERED or run.rank is None:
        return None
    return dome.attach(
        model,
        optimizer,
        run.rank,
        tracker=run.tracker,
        update_every=run.update_every,
        after=() if ewc is None else ewc,
        generator=generator(run.seed, FIRST_BASIS),
    )


def _learn(
    model: nn.Module,
    optimizer: Optimizer,
    stage: Stage,
    run: Run,
    order: torch.Generator,
    ewc: EWC | None,
) -> float:
    """Train on a task; the mean loss of its last epoch, without the penalty."""
    penalised = ewc is not None and run.arm != FILTERED and ewc.num_tasks > 0
    losses = [0.0]
    for _ in range(run.epochs):
        losses = []
        shuffled = torch.randperm(len(stage.train_x), generator=order)
        for batch in shuffled.split(run.batch_size):
            if len(batch) < run.batch_size:
                continue
            optimizer.zero_grad()
            loss = stage.loss(model(stage.train_x[batch]), stage.train_y[batch])
            (loss + ewc.penalty() if penalised and ewc is not None else loss).backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def _consolidate(
    ewc: EWC,
    stage: Stage,
    order: torch.Generator,
    filtering: dome.GradientFilter | None,
) -> None:
    chosen = torch.randperm(len(stage.train_x), generator=order)[:FISHER_SAMPLES]
    batches = [(stage.train_x[c], stage.train_y[c]) for c in chosen.split(CHUNK)]
    ewc.consolidate(stage.loss, batches, grad_filter=filtering)


@torch.no_grad()
def _has_diverged(model: nn.Module, stage: Stage) -> bool:
    # Asked this way round, NaN has diverged too.
    return not float(stage.loss(model(stage.test_x), stage.test_y)) < DIVERGED


@torch.no_grad()
def _accuracy(model: nn.Module, stage: Stage) -> float:
    answers = model(stage.test_x)[:, stage.classes].argmax(dim=1)
    return float((answers == stage.test_y).double().mean())


def _of_classes(task: Task, classes: Tensor) -> Stage:
    train, test = (torch.isin(y, classes) for y in (task.train_y, task.test_y))
    first = int(classes[0])
    return Stage(
        task.train_x[train],
        task.train_y[train] - first,
        task.test_x[test],
        task.test_y[test] - first,
        classes,
    )


def _permuted(task: Task, order: Tensor) -> Stage:
    def permute(x: Tensor) -> Tensor:
        return x.flatten(1)[:, order].view(x.shape)

    return Stage(
        permute(task.train_x),
        task.train_y,
        permute(task.test_x),
        task.test_y,
        torch.arange(task.num_classes),
    )
