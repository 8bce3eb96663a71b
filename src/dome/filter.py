"""The filter between ``backward()`` and ``optimizer.step()``.

Shapes: G (B, D) gradient samples, g (D,) the batch gradient, U (D, K) the basis. At
    every
step the samples of the batch turn the basis, then g − U Uᵀ g takes the place of g.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome import checkpoint
from dome.blocks import make_trackers
from dome.diagnostics import FilterStats, collect_stats
from dome.layout import Layout
from dome.samples import source_for
from dome.trackers import StreamingPower, Tracker

LOSS_REDUCTIONS = ("mean", "sum")

Downstream = Callable[[Tensor], Tensor]
TrackerFactory = Callable[[int, int], Tracker]


class GradientFilter:
    """Removes the leading directions of the per-sample covariance from the gradient.

    Call ``step()`` between ``backward()`` and ``optimizer.step()``, or let
    ``dome.attach`` do it. Use as a context manager to detach at the end.

    Args:
        model: The model that is trained; it is neither wrapped nor changed.
        rank: Number of directions K; with ``layout="layerwise"`` the number for each
            layer (at most its size), or a dictionary from layer names to numbers, where
            layers not named are left alone.
        tracker: "power" (the paper's), "svd", or a function (dim, rank) -> tracker.
        layout: "global", one basis for all parameters, or "layerwise", one a layer.
        samples: "per_sample", or "microbatch": the backward passes of one step are the
            samples, which works with every layer.
        update_every: Take samples on every n-th step only.
        oversample: Track this many directions more than are removed.
        strength: Multiplies the removed part, in [0, 1]; or a function of the step.
        warmup: Number of first steps that only watch.
        forget: None averages all batches (the paper); a number in (0, 1) is the weight
            of the newest batch.
        after: What the filtered gradient (D,) goes through, in order.
        loss_reduction: How the loss sums up samples: "mean" or "sum".
        generator: Source of the initial basis; without one a fixed seed is used.
        basis_dtype: Storage of the basis: torch.float32, float64 or bfloat16; the
            parameters' own precision (at least float32) if not given.
        batch_dim: Which dimension of the model's input enumerates samples, if not 0.
        scaler: The ``torch.amp.GradScaler`` in use, so that its factor is taken out.
        parameters: Filter only those of the model's parameters that are among these.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | Mapping[str, int],
        *,
        tracker: str | TrackerFactory = "power",
        layout: str = "global",
        samples: str = "per_sample",
        update_every: int = 1,
        oversample: int = 0,
        strength: float | Callable[[int], float] = 1.0,
        warmup: int = 0,
        forget: float | None = None,
        after: Downstream | Sequence[Downstream] = (),
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        basis_dtype: torch.dtype | None = None,
        batch_dim: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        parameters: Iterable[Tensor] | None = None,
    ) -> None:
        if update_every < 1:
            raise ValueError(f"update_every must be at least 1, got {update_every}")
        if warmup < 0:
            raise ValueError(f"warmup must not be negative, got {warmup}")
        if loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(
                f"loss_reduction must be one of {LOSS_REDUCTIONS}, "
                f"got {loss_reduction!r}"
            )
        if not callable(strength):
            _check_strength(strength)
        self._strength, self._warmup = strength, warmup
        self._update_every, self._loss_reduction = update_every, loss_reduction
        self._after = (after,) if callable(after) else tuple(after)
        self._scaler = scaler
        self._layout = Layout(model, layout, only=parameters)
        self._blocks, self._trackers = make_trackers(
            self._layout,
            rank,
            tracker,
            {"oversample": oversample, "forget": forget, "generator": generator},
            basis_dtype,
        )
        self._source = source_for(samples, model, self._layout, batch_dim=batch_dim)
        self._handles: list[RemovableHandle] = []
        self._num_steps = 0
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Take the samples of this step, turn the basis, filter ``.grad`` in place."""
        start = time.perf_counter()
        rows = self._source.take() if self._takes_samples() else None
        self._filter(rows)
        self._num_steps += 1
        self._source.arm(self._takes_samples())
        self._seconds = time.perf_counter() - start

    @torch.no_grad()
    def observe(self, grads: Tensor) -> None:
        """Turn the basis towards gradient samples of your own, shape (B, D)."""
        if grads.dim() != 2 or grads.shape[1] != self._layout.dim:
            raise ValueError(
                f"samples must have shape (B, {self._layout.dim}), one gradient a row, "
                f"got {tuple(grads.shape)}"
            )
        for columns, tracker in self._columns():
            tracker.update(grads[:, columns])

    @torch.no_grad()
    def filter_(self) -> None:
        """Filter ``.grad`` with the basis as it is, without counting a step."""
        self._filter(None)

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer. Can be called twice."""
        self._source.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_attached(self) -> bool:
        """Whether an optimizer calls this filter."""
        return bool(self._handles)

    def hook_into(self, handle: RemovableHandle) -> None:
        """Remember a hook that calls this filter, for ``detach`` to remove."""
        self._handles.append(handle)

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block: "all", or one a layer by the layer's name."""
        return {
            block.name: tracker
            for block, tracker in zip(self._blocks, self._trackers, strict=True)
        }

    @property
    def stats(self) -> FilterStats:
        """What the last step did. Computed when asked for."""
        before, after = (1.0, 1.0) if self._norms is None else map(float, self._norms)
        kept = after / before if before > 0 else 1.0
        return collect_stats(self._trackers, self._num_steps, kept, self._seconds)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a flat dictionary of tensors."""
        state = checkpoint.shapes_of(self._layout)
        state["num_steps"] = torch.tensor(self._num_steps)
        for name, tracker in self.trackers.items():
            prefix = f"{checkpoint.BLOCK}{name}."
            state |= checkpoint.with_prefix(prefix, tracker.state_dict())
        for i, stage in enumerate(self._after):
            if hasattr(stage, "state_dict"):
                prefix = f"{checkpoint.AFTER}{i}."
                state |= checkpoint.with_prefix(prefix, stage.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; one of another model, layout or rank is refused."""
        checkpoint.check_model(self._layout, state)
        own = {name: t.state_dict() for name, t in self.trackers.items()}
        saved = {
            name: checkpoint.below_prefix(f"{checkpoint.BLOCK}{name}.", state)
            for name in own
        }
        checkpoint.check_blocks(own, state)
        for name, tracker in self.trackers.items():
            tracker.load_state_dict(saved[name])
        for i, stage in enumerate(self._after):
            if hasattr(stage, "load_state_dict"):
                stage.load_state_dict(
                    checkpoint.below_prefix(f"{checkpoint.AFTER}{i}.", state)
                )
        self._num_steps = int(state["num_steps"])
        self._source.discard()
        self._source.arm(self._takes_samples())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

    def _takes_samples(self) -> bool:
        return self._num_steps % self._update_every == 0

    def _sample_scale(self, num_rows: int) -> float:
        """What turns captured rows into gradients of single samples."""
        # The rows add up to the batch gradient; a mean loss divided each by their
        # number.
        scale = float(num_rows) if self._loss_reduction == "mean" else 1.0
        return scale if self._scaler is None else scale / self._scaler.get_scale()

    def _columns(self) -> Iterator[tuple[slice, Tracker]]:
        for block, tracker in zip(self._blocks, self._trackers, strict=True):
            yield slice(block.start, block.stop), tracker

    def _filter(self, rows: Tensor | None) -> None:
        gradient = self._layout.gather()
        norm = torch.linalg.vector_norm(gradient)
        strength = self._current_strength(gradient, norm)
        self._update(rows)
        filtered = gradient
        if strength:
            filtered = self._filtered(gradient, strength, self._known(rows, gradient))
        self._norms = norm, torch.linalg.vector_norm(filtered) if strength else norm
        for stage in self._after:
            filtered = stage(filtered)
            if filtered.shape != gradient.shape:
                raise ValueError(
                    f"{stage!r} in after returned shape {tuple(filtered.shape)} for a "
                    f"gradient of shape {tuple(gradient.shape)}"
                )
        if filtered is not gradient:
            self._layout.scatter_(filtered)

    def _update(self, rows: Tensor | None) -> None:
        """Turn the basis towards the captured rows, if there are any."""
        if rows is None:
            return
        scale = self._sample_scale(len(rows))
        for columns, tracker in self._columns():
            tracker.update(rows[:, columns], scale)

    def _known(self, rows: Tensor | None, gradient: Tensor) -> float | None:
        """What the samples' mean is multiplied by to give the gradient, if it does.

        It does as long as nobody clipped or changed ``.grad``. Then the update has
        Uᵀ g already, which saves the filter one of two passes over U.
        """
        if rows is None or rows.dtype != gradient.dtype:
            return None
        difference = rows.sum(dim=0).sub_(gradient)
        # Rounding of a sum of B rows in another order.
        limit = 4 * torch.finfo(gradient.dtype).eps * torch.linalg.vector_norm(gradient)
        if not bool(torch.linalg.vector_norm(difference) <= limit):
            return None
        return len(rows) / self._sample_scale(len(rows))

    def _filtered(
        self, gradient: Tensor, strength: float, known: float | None
    ) -> Tensor:
        if len(self._trackers) == 1 and self._blocks[0].dim == self._layout.dim:
            return _project(self._trackers[0], gradient, strength, known)
        filtered = gradient.clone()
        for columns, tracker in self._columns():
            filtered[columns] = _project(tracker, gradient[columns], strength, known)
        return filtered

    def _current_strength(self, gradient: Tensor, norm: Tensor) -> float:
        """How much of the removed part to remove at this step, 0 for only watching."""
        strength = self._strength
        if callable(strength):
            strength = strength(self._num_steps)
            _check_strength(strength)
        # A gradient that is not finite would spread to every parameter through U Uᵀ g:
        # leave it where it is, for the user to see. A norm may overflow by itself.
        finite = bool(norm.isfinite()) or bool(gradient.isfinite().all())
        watching = self._num_steps < self._warmup
        return 0.0 if watching or not finite else strength


def _project(
    tracker: Tracker, gradient: Tensor, strength: float, known: float | None
) -> Tensor:
    """The gradient without its part in a tracker's span.

    Args:
        tracker: Whose basis it is.
        gradient: g, shape (D,).
        strength: How much of the part to remove.
        known: If it is not None, g is this many times the mean of the newest samples.
    """
    if known is not None and isinstance(tracker, StreamingPower):
        mean = tracker.mean_coordinates
        if mean is not None:
            return tracker.project_out(gradient, strength, coordinates=known * mean)
    return tracker.project_out(gradient, strength)


def _check_strength(strength: float) -> None:
    if not 0 <= strength <= 1:
        raise ValueError(
            f"strength must lie between 0 (remove nothing) and 1, got {strength}"
        )
