"""How much of a gradient, and of its running average, lies in the tracked subspace.

Letters: D parameters, g (D,) the gradient of a batch, m (D,) its average, U (D, K).
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.train import training

BETAS = (0.0, 0.9, 0.99)  # 0 is the gradient itself


def compute_shares(run: Run) -> Iterator[Row]:
    """Train with a tracker that only watches; yield a row an epoch and average.

    All averages, m ← β m + (1 − β) g, are of the same gradients, whichever momentum the
    run is trained with.
    """
    model, task, steps = training(run)
    num_steps = len(task.train_x) // run.batch_size
    averages: dict[float, Tensor] = {}
    sums = dict.fromkeys(BETAS, 0.0)
    started = time.perf_counter()
    for step in steps:
        if step.filter is None:
            raise ValueError("a run without a tracker has no subspace: set a rank")
        (tracker,) = step.filter.trackers.values()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        g = torch.cat(grads)
        for beta in BETAS:
            # From zero on; the share does not change with the bias, which is a factor.
            m = averages.setdefault(beta, torch.zeros_like(g))
            m.lerp_(g, 1 - beta)
            sums[beta] += energy_share(tracker.basis, m)
        if step.number % num_steps:
            continue
        end = time.perf_counter()
        for beta in BETAS:
            yield Row(
                **run.columns(),
                epoch=step.epoch,
                beta=beta,
                share=sums[beta] / num_steps,
                seconds=(end - started) / len(BETAS),
            )
        sums, started = dict.fromkeys(BETAS, 0.0), end


def energy_share(basis: Tensor, vector: Tensor) -> float:
    """‖Uᵀ v‖² / ‖v‖², of a basis U (D, K) and a vector v (D,)."""
    return float((basis.T @ vector).square().sum() / vector.square().sum())
