"""A run under way: steps, and a state from which it goes on bit for bit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome_lab.paper.arms import Arm
from dome_lab.paper.optimizers import make_optimizer
from dome_lab.paper.randomness import SAMPLE_ORDER, generator
from dome_lab.paper.run import Run
from dome_lab.paper.subspace import SubspaceWatch
from dome_lab.paper.tasks import Task


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
