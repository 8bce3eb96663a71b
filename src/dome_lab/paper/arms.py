"""What a run does to the gradient between ``backward()`` and the optimizer's step.

Shapes: g (D,) the batch gradient, U (D, K) the tracked basis.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dome
from dome.compression import (
    QSGD,
    Compressor,
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from dome.compression.message import FRONT_BYTES
from dome.parameters import Layout
from dome_lab.paper.controls import CURVATURE_SAMPLES, HessianOutliers, control_of
from dome_lab.paper.device import FIRST_BASIS, SKETCH_NOISE, generator
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import Task, some_samples


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


NUMBER_BITS = 32
FRONT_BITS = 8 * FRONT_BYTES  # of every message, not counted here
ROUNDING = 64  # a message ends with a whole number, and with a whole byte
MOST_RANK = 16  # of PowerSGD
LEVELS = (127, 63, 31, 15, 7, 3, 1)  # of QSGD: as many bits less one


def make_compressor(run: Run, layout: Layout) -> Compressor | None:
    """What a run compresses the flat gradient with; None if it does not."""
    if run.rate is None:
        return None
    if run.compressor == "gaussian":
        noise = generator(run.seed, SKETCH_NOISE, layout.device)
        return GaussianSketch(run.rate, generator=noise)
    seed = generator(run.seed, SKETCH_NOISE).initial_seed()
    most = NUMBER_BITS * layout.dim / run.rate
    return _largest(_FAMILIES[run.compressor](run.rate, layout, seed), layout, most)


def times_fewer_bits(compressor: Compressor, dim: int) -> float:
    """How many times fewer bits the numbers in a message have, for D numbers."""
    return NUMBER_BITS * dim / _bits(compressor, dim)


def _largest(choices: Iterable[Compressor], layout: Layout, most: float) -> Compressor:
    """The first of some compressors, from large messages to small, that fits."""
    bits = 0
    for compressor in choices:
        bits = _bits(compressor, layout.dim)
        if bits <= most + ROUNDING:
            return compressor
    raise ValueError(
        f"{compressor!r} sends {bits:,} bits for {layout.dim:,} numbers, which is "
        f"more than the {most:,.0f} of this rate: choose a rate of at most "
        f"{NUMBER_BITS * layout.dim / bits:.3g}"
    )


def _bits(compressor: Compressor, dim: int) -> int:
    return compressor.num_bits(dim) - FRONT_BITS


def _top(rate: float, layout: Layout, _: int) -> Iterable[Compressor]:
    index_bits = max(1, (layout.dim - 1).bit_length())
    return [ErrorFeedback(TopK(rate * (1 + index_bits / NUMBER_BITS)))]


def _powers(_: float, layout: Layout, seed: int) -> Iterable[Compressor]:
    shapes = [slot.shape for slot in layout.slots]
    ranks = range(MOST_RANK, 0, -1)
    return [ErrorFeedback(PowerSGD(shapes, rank, seed=seed)) for rank in ranks]


_Family = Callable[[float, Layout, int], Iterable[Compressor]]
_FAMILIES: dict[str, _Family] = {
    "hadamard": lambda rate, _, seed: [HadamardSketch(rate, seed=seed)],
    "randomk": lambda rate, _, seed: [RandomK(rate, seed=seed)],
    "randomk+feedback": lambda rate, _, seed: [ErrorFeedback(RandomK(rate, seed=seed))],
    "topk+feedback": _top,
    "signsgd+feedback": lambda *_: [ErrorFeedback(SignSGD())],
    "terngrad": lambda _, __, seed: [TernGrad(seed=seed)],
    "qsgd": lambda _, __, seed: [QSGD(levels, seed=seed) for levels in LEVELS],
    "powersgd+feedback": _powers,
}


class Arm:
    """Filter and sketch as a run wants them, before every step of the optimizer.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer.
        run: What to track, what to remove, and how to compress.
        task: What is learned, which the Hessian needs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        task: Task | None = None,
    ) -> None:
        self._run, self._optimizer = run, optimizer
        self._layout = Layout(model)
        self._compressor = make_compressor(run, self._layout)
        self._filter: dome.GradientFilter | None = None
        self._kept_norm: Tensor | None = None
        self._num_skipped = 0
        self._outliers: HessianOutliers | None = None
        self._change = control_of(model, self._layout, optimizer, run)
        if self._change is not None:
            optimizer.register_step_pre_hook(self._change_by_hand)
        elif run.rank is None:
            if run.rate is not None:
                optimizer.register_step_pre_hook(self._compress)
        elif run.removes == "hessian":
            self._outliers = _outliers(model, run, task)
            optimizer.register_step_pre_hook(self._remove_outliers)
        elif run.removes in _SENT:
            self._filter = dome.GradientFilter(model, run.rank, **_options(run))
            optimizer.register_step_pre_hook(self._send_by_hand)
        else:
            strength = run.strength if run.removes == "span" else 0.0
            after = () if self._compressor is None else (self._compressor,)
            self._filter = dome.attach(
                model,
                optimizer,
                run.rank,
                strength=strength,
                after=after,
                **_options(run),
            )

    def step(self) -> tuple[float | None, float | None]:
        """Take the optimizer's step; tell how much of ‖g‖ goes on, and the fraction.

        Returns:
            The norm of what is compressed (or of what goes on, without compression)
            over ‖g‖, and the captured fraction of this batch: None without a tracker,
            or if this batch did not enter the basis; nor with ``direction_rank``.
        """
        with warnings.catch_warnings():
            # A run that diverges says so in its rows.
            warnings.filterwarnings("ignore", message="dome left a batch out")
            self._optimizer.step()
        if self._filter is None:
            kept = 1.0 if self._kept_norm is None else float(self._kept_norm)
            return kept, None
        stats = self._filter.stats
        kept = stats.kept_norm if self._kept_norm is None else float(self._kept_norm)
        updated = (stats.step - 1) % self._run.update_every == 0
        skipped, self._num_skipped = self._num_skipped, stats.skipped_updates
        has_fraction = updated and stats.skipped_updates == skipped
        has_fraction = has_fraction and self._run.direction_rank is None
        return kept, stats.fraction if has_fraction else None

    @property
    def times_fewer_bits(self) -> float | None:
        """How many times fewer bits are sent; None without compression."""
        if self._compressor is None:
            return None
        return times_fewer_bits(self._compressor, self._layout.dim)

    @property
    def filter(self) -> dome.GradientFilter | None:
        """The filter, if there is a tracker."""
        return self._filter

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """States of the filter, the compressor and the Hessian's eigenspace."""
        skipped = {"num_skipped": torch.tensor(self._num_skipped)}
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {**parts, "arm": skipped}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a state of the same run."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._num_skipped = int(state["arm"]["num_skipped"])

    def _parts(self) -> dict[str, Any]:
        run = self._run
        parts = {
            "filter": self._filter,
            "compressor": self._compressor,
            "outliers": self._outliers,
            # The other controls remember nothing.
            "control": self._change if run.removes == "preconditioned" else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def detach(self) -> None:
        """Take the filter off the model."""
        if self._filter is not None:
            self._filter.detach()

    def _compress(self, *_: Any) -> None:  # noqa: ANN401 - what torch gives a hook
        self._layout.scatter_(self._sketch(self._layout.gather()))

    def _sketch(self, gradient: Tensor) -> Tensor:
        """What arrives of a gradient (D,)."""
        return gradient if self._compressor is None else self._compressor(gradient)

    def _remove_outliers(self, *_: Any) -> None:  # noqa: ANN401 - what torch gives
        if self._outliers is None:
            raise RuntimeError("this arm has no eigenspace")
        gradient = self._layout.gather()
        outside = self._outliers.project_out(gradient)
        self._kept_norm = torch.linalg.vector_norm(outside)
        self._kept_norm /= torch.linalg.vector_norm(gradient)
        self._layout.scatter_(self._sketch(outside))

    def _change_by_hand(self, *_: Any) -> None:  # noqa: ANN401 - what torch gives
        if self._change is None:
            raise RuntimeError("this arm has no control")
        gradient = self._layout.gather()
        changed = self._change(gradient)
        self._kept_norm = torch.linalg.vector_norm(changed)
        self._kept_norm /= torch.linalg.vector_norm(gradient)
        self._layout.scatter_(self._sketch(changed))

    def _send_by_hand(self, *_: Any) -> None:  # noqa: ANN401 - what torch gives a hook
        if self._filter is None:
            raise RuntimeError("this arm has no filter")
        gradient = self._layout.gather()
        self._filter.step()
        outside = self._layout.gather()
        compressed, exact = _SENT[self._run.removes](gradient - outside, outside)
        self._kept_norm = torch.linalg.vector_norm(compressed)
        self._kept_norm /= torch.linalg.vector_norm(gradient)
        self._layout.scatter_(self._sketch(compressed) + exact)


def _rest_removed(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    return inside, torch.zeros_like(outside)


def _span_uncoded(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    return outside, inside


# From U Uᵀ g and g − U Uᵀ g: what goes through the sketch, and what is sent exactly.
_SENT = {"rest": _rest_removed, "uncoded": _span_uncoded}


def _outliers(model: nn.Module, run: Run, task: Task | None) -> HessianOutliers:
    if task is None or run.rank is None:
        raise ValueError("removes='hessian' needs a task and a rank")
    samples = some_samples(task, CURVATURE_SAMPLES)
    return HessianOutliers(model, samples, run.rank, run.update_every)


def _options(run: Run) -> dict[str, Any]:
    return {
        "tracker": run.tracker,
        "forget": run.forget,
        "update_every": run.update_every,
        "layout": run.layout,
        "oversample": run.oversample,
        "direction_rank": run.direction_rank,
        "generator": generator(run.seed, FIRST_BASIS),
    }
