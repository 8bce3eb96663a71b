"""The filter between ``backward()`` and ``optimizer.step()``.

Shapes: G (B, D) gradient samples, g (D,) the batch gradient, U (D, K) the basis. At
every step the samples of the batch turn the basis, then g − U Uᵀ g takes the place of
g.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome import state as states
from dome.diagnostics import FilterStats, collect_stats
from dome.options import Schedule
from dome.parameters import Layout
from dome.samples import source_for
from dome.trackers import StreamingPower, Tracker
from dome.trackers.blockwise import make_trackers

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
        self._schedule = Schedule(
            update_every, strength, warmup, loss_reduction, scaler
        )
        self._after = (after,) if callable(after) else tuple(after)
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
        taking = self._schedule.takes_samples(self._num_steps)
        rows = self._source.take() if taking else None
        self._filter(rows)
        self._num_steps += 1
        self._source.arm(self._schedule.takes_samples(self._num_steps))
        self._seconds = time.perf_counter() - start

    def watch(self, *inputs: object) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs.

        For a step that calls parts of the model one by one, or a method of it, instead
        of ``model(...)``. Calls of the model inside belong to it.

        Args:
            *inputs: What the step starts from. The first tensor inside tells the
                number of samples.
        """
        return self._source.watch(inputs)

    def expect_backward(self, loss: Tensor) -> None:
        """Announce that ``loss.backward()`` follows.

        Needed with ``samples="microbatch"`` only, and only where the loss was computed
        without calling the model itself.
        """
        self._source.expect(loss)

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

    @torch.no_grad()
    def project_out(self, grads: Tensor) -> Tensor:
        """Gradient samples (B, D) without their part in the tracked span."""
        filtered = grads.clone()
        for columns, tracker in self._columns():
            U = tracker.basis.to(grads)
            filtered[:, columns] -= (grads[:, columns] @ U) @ U.T
        return filtered

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
        state = states.shapes_of(self._layout)
        state["num_steps"] = torch.tensor(self._num_steps)
        for name, tracker in self.trackers.items():
            prefix = f"{states.BLOCK}{name}."
            state |= states.with_prefix(prefix, tracker.state_dict())
        return state | states.stages(self._after)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; one of another model, layout or rank is refused."""
        states.check_model(self._layout, state)
        own = {name: t.state_dict() for name, t in self.trackers.items()}
        saved = {
            name: states.below_prefix(f"{states.BLOCK}{name}.", state) for name in own
        }
        states.check_blocks(own, state)
        for name, tracker in self.trackers.items():
            tracker.load_state_dict(saved[name])
        states.load_stages(self._after, state)
        self._num_steps = int(state["num_steps"])
        self._source.discard()
        self._source.arm(self._schedule.takes_samples(self._num_steps))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()

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
        filtered = pass_through(self._after, filtered)
        if filtered is not gradient:
            self._layout.scatter_(filtered)

    def _update(self, rows: Tensor | None) -> None:
        """Turn the basis towards the captured rows, if there are any."""
        if rows is None:
            return
        scale = self._schedule.sample_scale(len(rows))
        for columns, tracker in self._columns():
            tracker.update(rows[:, columns], scale)

    def _known(self, rows: Tensor | None, gradient: Tensor) -> float | None:
        """What the samples' mean is multiplied by to give the gradient, if it does.

        It does as long as nobody clipped or changed ``.grad``. Then the update has
        Uᵀ g already, which saves the filter one of two passes over U.
        """
        if rows is None or not adds_up(rows, gradient):
            return None
        return len(rows) / self._schedule.sample_scale(len(rows))

    def _filtered(
        self, gradient: Tensor, strength: float, known: float | None
    ) -> Tensor:
        if len(self._trackers) == 1 and self._blocks[0].dim == self._layout.dim:
            return project(self._trackers[0], gradient, strength, known)
        filtered = gradient.clone()
        for columns, tracker in self._columns():
            filtered[columns] = project(tracker, gradient[columns], strength, known)
        return filtered

    def _current_strength(self, gradient: Tensor, norm: Tensor) -> float:
        """How much of the removed part to remove at this step, 0 for only watching."""
        # A gradient that is not finite would spread to every parameter through U Uᵀ g:
        # leave it where it is, for the user to see. A norm may overflow by itself.
        finite = math.isfinite(norm) or bool(gradient.isfinite().all())
        strength = self._schedule.strength_at(self._num_steps)
        return strength if finite else 0.0


def adds_up(rows: Tensor, gradient: Tensor) -> bool:
    """Whether captured rows (B, D) are all of a gradient (D,), up to rounding."""
    if rows.dtype != gradient.dtype:
        return False
    difference = rows.sum(dim=0).sub_(gradient)
    # Rounding of a sum of B rows in another order.
    limit = 4 * torch.finfo(gradient.dtype).eps * torch.linalg.vector_norm(gradient)
    return bool(torch.linalg.vector_norm(difference) <= limit)


def pass_through(after: Sequence[Downstream], gradient: Tensor) -> Tensor:
    """What becomes of a filtered gradient (D,) behind the filter."""
    shape = gradient.shape
    for stage in after:
        gradient = stage(gradient)
        if gradient.shape != shape:
            raise ValueError(
                f"{stage!r} in after returned shape {tuple(gradient.shape)} for a "
                f"gradient of shape {tuple(shape)}"
            )
    return gradient


def project(
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
