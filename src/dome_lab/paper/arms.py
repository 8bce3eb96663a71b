"""What a run does to the gradient between ``backward()`` and ``optimizer.step()``.

Shapes: g (D,) the batch gradient, U (D, K) the tracked basis.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dome
from dome.parameters import Layout
from dome_lab.paper.compressors import make_compressor, times_fewer_bits
from dome_lab.paper.controls import control_of
from dome_lab.paper.outliers import CURVATURE_SAMPLES, HessianOutliers
from dome_lab.paper.randomness import FIRST_BASIS, generator
from dome_lab.paper.run import Run
from dome_lab.paper.tasks.selection import some_samples
from dome_lab.paper.tasks.task import Task


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
