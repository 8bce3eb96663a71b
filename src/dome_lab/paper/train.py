"""The one training loop of the experiments, and the state from which it resumes.

Two runs of one seed that differ in nothing but the filter have the same initial
weights, the same order of samples and the same sketch noise (``device.py``), and the
global generator is left as it was.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome import GradientFilter
from dome.diagnostics.angles import principal_angles
from dome_lab.paper.arms import Arm, make_optimizer
from dome_lab.paper.device import (
    INITIAL_WEIGHTS,
    SAMPLE_ORDER,
    generator,
    training_device,
)
from dome_lab.paper.models import MODELS, make_model
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run, check_batch_size, check_name
from dome_lab.paper.tasks import TASKS, Task, load_task

NUM_LEADING = 200  # eigenvalues that are kept; a file of rows stays small
NUM_DIGITS = 5
MOST_MEMORY = 2**28  # bytes of older bases; to keep larger ones would be a cost


class SubspaceWatch:
    """Tells the spectrum, and how far the subspace turned since it was last asked."""

    def __init__(self) -> None:
        self._before: list[Tensor] | None = None

    @torch.no_grad()
    def look(self, grad_filter: GradientFilter | None) -> Row:
        """Leading eigenvalues, largest first, and the drift in degrees.

        The drift is the largest principal angle between the subspaces of this and of
        the last call, over all blocks. It is None at the first call, or where bases are
        too large to keep one for the next.

        Args:
            grad_filter: Whose subspace to look at; without one, both are None.
        """
        if grad_filter is None:
            return {"eigenvalues": None, "drift": None}
        trackers = list(grad_filter.trackers.values())
        values = torch.cat([t.eigenvalues.double().cpu() for t in trackers])
        leading = values.sort(descending=True).values[:NUM_LEADING]
        return {
            "eigenvalues": [float(f"{v:.{NUM_DIGITS}g}") for v in leading.tolist()],
            "drift": self._drift([tracker.basis for tracker in trackers]),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The bases of the last call, by their place."""
        return {str(place): U for place, U in enumerate(self._before or [])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Compare with the bases of a call before."""
        self._before = [state[str(place)] for place in range(len(state))] or None

    def _drift(self, bases: list[Tensor]) -> float | None:
        if sum(U.numel() * U.element_size() for U in bases) > MOST_MEMORY:
            return None
        before, self._before = self._before, [U.clone() for U in bases]
        if before is None:
            return None
        return max(map(_angle, before, bases))


def _angle(V: Tensor, U: Tensor) -> float:
    """Largest principal angle of two orthonormal bases (D, K), in degrees."""
    if not bool(U.isfinite().all()):
        return math.nan
    return math.degrees(principal_angles(V, U)[-1])


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has just been taken.

    Attributes:
        number: Steps taken so far.
        epoch: The epoch it belongs to, from 1 on.
        loss: Of its batch, before it.
        kept_norm: How much of ‖g‖ went on.
        fraction: Captured fraction of its batch, if known.
        times_fewer_bits: What compression saved, if there is any.
        filter: The filter of the run, if it has one.
    """

    number: int
    epoch: int
    loss: float
    kept_norm: float | None
    fraction: float | None
    times_fewer_bits: float | None
    filter: dome.GradientFilter | None


class Training:
    """Trains a model in place, an epoch at a time.

    Args:
        model: The model, where it is to be trained.
        task: What it learns.
        run: How.
    """

    def __init__(self, model: nn.Module, task: Task, run: Run) -> None:
        self._model, self._task, self._run = model, task, run
        self._optimizer = make_optimizer(model, run)
        self._arm = Arm(model, self._optimizer, run, task)
        self._order = generator(run.seed, SAMPLE_ORDER)
        self.watch = SubspaceWatch()
        self.num_epochs = 0

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return len(self._task.train_x) // self._run.batch_size

    def steps(self) -> Iterator[Step]:
        """Take the steps that are left, epoch after epoch; then let go of the model."""
        while self.num_epochs < self._run.epochs:
            yield from self._epoch()
        self._arm.detach()

    def _epoch(self) -> Iterator[Step]:
        size, x, y = self._run.batch_size, self._task.train_x, self._task.train_y
        device = next(self._model.parameters()).device
        shuffled = torch.randperm(len(x), generator=self._order)
        before = self.num_epochs * self.num_steps
        for step in range(self.num_steps):
            batch = shuffled[step * size : (step + 1) * size]
            self._optimizer.zero_grad()
            output = self._model(x[batch].to(device))
            loss = cross_entropy(output, y[batch].to(device))
            loss.backward()
            kept_norm, fraction = self._arm.step()
            if step == self.num_steps - 1:
                self.num_epochs += 1  # who sees the last step may ask for the state
            yield Step(
                before + step + 1,
                before // self.num_steps + 1,
                loss.item(),
                kept_norm,
                fraction,
                self._arm.times_fewer_bits,
                self._arm.filter,
            )

    def state_dict(self) -> dict[str, Any]:
        """All that the next epoch depends on; after a whole one."""
        return {
            "num_epochs": self.num_epochs,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "arm": self._arm.state_dict(),
            "order": self._order.get_state(),
            "watch": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the epoch that the state is of."""
        self.num_epochs = int(state["num_epochs"])
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._arm.load_state_dict(state["arm"])
        self._order.set_state(state["order"])
        self.watch.load_state_dict(state["watch"])


EVALUATION_BATCH = 1024


class Keeper(Protocol):
    """What makes a run go on where it stopped (``jobs.py``)."""

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
    beside = _seconds_without(run) if run.paced else None
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
        if beside is not None:
            row["plain_seconds"] = next(beside)
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
        "test_macro_f1": macro_f1(y.flatten(), answers.flatten()),
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
        model = make_model(run.model, task)
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


def _seconds_without(run: Run) -> Iterator[float]:
    """The processor's seconds of each epoch of the same training without a tracker.

    An epoch is computed when it is asked for. In a run that resumes, this training
    begins anew: its seconds are the same.
    """
    task, model = start(run)
    for epoch in _epochs(Training(model, task, replace(run, rank=None))):
        yield epoch.processor_seconds


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None if there is none, or it is not finite."""
    there = [value for value in values if value is not None]
    return _finite(sum(there) / len(there)) if there else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
