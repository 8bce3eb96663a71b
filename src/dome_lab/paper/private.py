"""Private training: accuracy by epsilon, with and without a basis that keeps privacy.

Letters: N samples that are private, L the expected batch size, σ the noise multiplier.
Of the training samples some are taken as public (``Run.public_every``), in every arm,
so that all arms learn from the same N.
"""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import dome
from dome_lab.paper.arms import make_optimizer
from dome_lab.paper.device import SAMPLE_ORDER, generator
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.tasks import Task
from dome_lab.paper.train import evaluate, start

DELTA = 1e-5
PUBLIC_BATCH = 64
PUBLIC_LR, PUBLIC_MOMENTUM = 0.1, 0.9
UPDATE_EVERY = 2  # of the released basis: filters before clipping on steps between


def compute_private(run: Run) -> Iterator[Row]:
    """Train privately and yield a row an epoch.

    The noise is reproducible, which is good for a figure and for nothing else.
    """
    task, model = start(run)
    if run.pretrain:
        train_publicly(model, task, run)
    before = evaluate(model, task.test_x, task.test_y)["test_accuracy"]
    optimizer = make_optimizer(model, run)
    private_x, private_y = _part(task, run, public=False)
    rate = run.batch_size / len(private_x)
    private = _attach(run, model, optimizer, task, rate)
    loader = private.loader(TensorDataset(private_x, private_y))
    for epoch in range(1, run.epochs + 1):
        started, losses = time.perf_counter(), []
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * bool(len(x))
        seconds = time.perf_counter() - started
        yield Row(
            **run.columns(),
            epoch=epoch,
            train_loss=sum(losses) / len(losses) if losses else None,
            **evaluate(model, task.test_x, task.test_y),
            noise_multiplier=private.noise_multiplier,
            spent=_spent(private),
            delta=DELTA,
            num_private=len(private_x),
            accuracy_before=before,
            seconds=seconds,
        )
    private.detach()


def train_publicly(
    model: nn.Module, task: Task, run: Run, lr: float = PUBLIC_LR
) -> None:
    """Train on the public samples alone, without noise, for ``run.pretrain`` epochs."""
    x, y = public_samples(task, run)
    optimizer = SGD(model.parameters(), lr=lr, momentum=PUBLIC_MOMENTUM)
    order = torch.Generator().manual_seed(run.seed)
    for _ in range(run.pretrain):
        for part in torch.randperm(len(x), generator=order).split(PUBLIC_BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()


def _attach(
    run: Run, model: nn.Module, optimizer: Optimizer, task: Task, rate: float
) -> dome.privacy.PrivateFilter:
    if run.epsilon is None or run.max_grad_norm is None:
        raise ValueError(f"a private run has epsilon and max_grad_norm: {run}")
    options: dict[str, Any] = {}
    if run.basis == "public":
        options = {"public": _public_batches(task, run), "loss_fn": cross_entropy}
    return dome.privacy.attach(
        model,
        optimizer,
        run.rank or 0,
        run.max_grad_norm,
        sample_rate=rate,
        basis=run.basis or "released",
        target_epsilon=run.epsilon,
        target_delta=DELTA,
        epochs=run.epochs,
        update_every=UPDATE_EVERY if run.basis == "released" else run.update_every,
        generator=generator(run.seed, SAMPLE_ORDER),
        **options,
    )


def _part(task: Task, run: Run, *, public: bool) -> tuple[Tensor, Tensor]:
    """The public or the private training samples."""
    place = torch.arange(len(task.train_x))
    # Samples are in the order of their data set, which is not that of their classes.
    is_public = place % run.public_every == 0 if run.public_every else place < 0
    chosen = is_public == public
    return task.train_x[chosen], task.train_y[chosen]


def public_samples(task: Task, run: Run) -> tuple[Tensor, Tensor]:
    """The training samples that a public basis may see."""
    return _part(task, run, public=True)


def _public_batches(task: Task, run: Run) -> list[tuple[Tensor, Tensor]]:
    x, y = public_samples(task, run)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(run.seed))
    parts = order.split(min(PUBLIC_BATCH, len(x)))
    return [(x[part], y[part]) for part in parts if len(part) > 1]


def _spent(private: dome.privacy.PrivateFilter) -> float:
    with warnings.catch_warnings():
        # Early epochs have cost so little that Opacus' orders end before the best one.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        return private.epsilon(DELTA)
