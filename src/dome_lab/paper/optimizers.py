"""The optimizers of runs: torch's SGD and Adam, and the paper's averaging momentum."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from dome_lab.paper.run import Run


# An optimizer of its own because what a run does to the gradient is hooked onto one.
class AveragingMomentum(Optimizer):
    """Momentum as an average, bias-corrected, as Algorithm 1 has it.

        m ← β m + (1 − β) g,   θ ← θ − lr · m / (1 − βᵗ)

    torch's SGD sums instead, m ← β m + g, so that its steps are 1 / (1 − β) times as
    long once it is under way: ten times at β = 0.9.

    Args:
        params: The parameters.
        lr: Learning rate.
        momentum: β, in [0, 1); 0 is SGD without momentum.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    # The base class declares what a closure returns in a way that allows no better.
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None
    ) -> None:
        """Take a step by the gradients that are there."""
        if closure is not None:
            raise ValueError("this optimizer takes no closure: call backward() before")
        for group in self.param_groups:
            beta = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 1 - beta)
                correction = 1 - beta ** state["step"]
                parameter.sub_(state["average"], alpha=group["lr"] / correction)


def make_optimizer(model: nn.Module, run: Run) -> Optimizer:
    """The optimizer of a run."""
    if run.optimizer == "adam":
        return Adam(model.parameters(), lr=run.lr)
    if run.optimizer == "ema":
        return AveragingMomentum(model.parameters(), run.lr, run.momentum)
    return SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
