"""The filter over workers without compression: every worker holds rows of U.

Letters: D parameters, K directions, P workers, B samples of all workers together. An
all-to-all brings worker p its columns of every sample, so that it holds G[:, p] (B,
D/P) beside U[p] (D/P, K). All that an update needs of the others are sums of B K + B²
or K² numbers; the filtered gradient is gathered as DDP's own all-reduce ends.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dome import state as states
from dome.diagnostics import collect_stats
from dome.distributed.covariance_action import Action
from dome.distributed.handshake import (
    Greeting,
    greet,
    has_gradient,
    make_room,
    nothing_but,
    sample_counts,
)
from dome.distributed.local import LocalGradients, check_switchable
from dome.distributed.resharding import Movement, describe_whole
from dome.distributed.traffic import DistributedStats
from dome.distributed.workers import Workers
from dome.filter import Downstream, adds_up, pass_through, project
from dome.numerics.shard import Shard
from dome.options import Schedule
from dome.parameters import Block, Layout
from dome.samples import source_for
from dome.trackers import StreamingPower, Tracker
from dome.trackers.blockwise import make_trackers

SOURCES = {"per_sample": "per_sample", "worker": "microbatch"}


def check_samples(samples: str) -> None:
    """Refuse a kind of samples that there is not."""
    if samples not in SOURCES:
        raise ValueError(f"samples must be one of {tuple(SOURCES)}, got {samples!r}")


class ShardedFilter:
    """``GradientFilter`` for a DDP model, with its basis split over the workers.

    All workers must call ``step()``, ``state_dict()`` and ``load_state_dict()``
    together. Until ``step()`` a worker's ``.grad`` is its own; then it is the filtered
    average over workers, the same on all.

    Args:
        model: The DDP model; its own communication is off from now on.
        rank: Number of directions K, or numbers by layer, as for ``GradientFilter``.
        samples: "per_sample", or "worker": each worker's local gradient is one sample,
            or with gradient accumulation each of its micro-batches.
        tracker: "power", "svd", or a function (dim, rank, shard) -> tracker.
        layout: As all options from here on: see ``GradientFilter``.
        update_every: Take samples on every n-th step only.
        oversample: Track this many directions more than are removed.
        strength: Multiplies the removed part.
        warmup: Number of first steps that only watch.
        forget: Weight of the newest batch, if not that of an average.
        after: What the filtered gradient (D,) goes through, on every worker alike.
        loss_reduction: How the loss sums up samples: "mean" or "sum".
        generator: Source of the initial basis; that of the first worker counts.
        basis_dtype: Storage of the basis.
        batch_dim: Which dimension of the model's input enumerates samples, if not 0.
        parameters: Filter only those of the model's parameters that are among these.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        rank: int | Mapping[str, int],
        *,
        samples: str = "per_sample",
        tracker: str | Callable[..., Tracker] = "power",
        layout: str = "global",
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
        parameters: Iterable[Tensor] | None = None,
    ) -> None:
        check_samples(samples)
        check_switchable(model)
        self._schedule = Schedule(update_every, strength, warmup, loss_reduction)
        self._after = (after,) if callable(after) else tuple(after)
        self._layout = Layout(model.module, layout, only=parameters)
        self._workers = Workers(model.process_group, self._layout.device)
        self._movement = Movement(self._layout.dim, self._workers)
        self._blocks, self._trackers = make_trackers(
            self._layout,
            rank,
            tracker,
            {
                "oversample": oversample,
                "forget": forget,
                "generator": self._workers.agree_on(generator),
            },
            basis_dtype,
            self._shard_of,
        )
        self._action = self._make_action()
        self._source = source_for(
            SOURCES[samples], model.module, self._layout, batch_dim=batch_dim
        )
        self._local = LocalGradients(model, self._workers)
        self._handles: list[RemovableHandle] = []
        self._num_steps = 0
        self._norms = (1.0, 1.0)
        self._seconds = 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients of all workers, turn the basis, filter ``.grad``."""
        start = time.perf_counter()
        self._workers.traffic.begin_step()
        taking = self._schedule.takes_samples(self._num_steps)
        rows = self._source.take() if taking else None
        gradient = self._layout.gather()
        everyone = self._greet(rows, gradient)
        make_room(self._layout, everyone)
        gradient, known = self._turn(rows, gradient, everyone)
        norm, strength = self._strength(gradient)
        if strength:
            gradient = self._filtered(gradient, strength, known)
        whole = self._movement.whole(gradient, "gradient")
        self._norms = norm, float(torch.linalg.vector_norm(whole)) if strength else norm
        self._layout.scatter_(pass_through(self._after, whole))
        self._local.send_buffers()
        self._num_steps += 1
        self._source.arm(self._schedule.takes_samples(self._num_steps))
        self._seconds = time.perf_counter() - start

    def detach(self) -> None:
        """Remove every hook; DDP averages gradients again. Can be called twice."""
        self._source.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._local.release()

    @property
    def is_attached(self) -> bool:
        """Whether an optimizer calls this filter."""
        return bool(self._handles)

    def hook_into(self, handle: RemovableHandle) -> None:
        """Remember a hook that calls this filter, for ``detach`` to remove."""
        self._handles.append(handle)

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block, holding this worker's rows of its basis."""
        pairs = zip(self._blocks, self._trackers, strict=True)
        return {block.name: tracker for block, tracker in pairs}

    @property
    def stats(self) -> DistributedStats:
        """What the last step did and sent. Computed when asked for, by any worker."""
        before, after = self._norms
        kept = after / before if before > 0 else 1.0
        base = collect_stats(self._trackers, self._num_steps, kept, self._seconds)
        num_bytes = self._layout.dim * self._layout.dtype.itemsize
        return self._workers.traffic.stats(base, num_bytes)

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of a ``GradientFilter`` in one process, whatever P is.

        All workers must call it. It is gathered on each, D K numbers; with ``only`` on
        that worker alone, and the others get an empty dictionary.
        """
        state = states.shapes_of(self._layout)
        state["num_steps"] = torch.tensor(self._num_steps)
        for block, tracker in zip(self._blocks, self._trackers, strict=True):
            prefix = f"{states.BLOCK}{block.name}."
            whole = self._movement.whole_state(block, tracker.state_dict(), only)
            state |= states.with_prefix(prefix, whole)
        state |= states.stages(self._after)
        return state if only in (None, self._workers.rank) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, of any number of workers or of one process."""
        states.check_model(self._layout, state)
        pairs = list(zip(self._blocks, self._trackers, strict=True))
        own = {b.name: describe_whole(b, t.state_dict()) for b, t in pairs}
        states.check_blocks(own, state)
        for block, tracker in pairs:
            whole = states.below_prefix(f"{states.BLOCK}{block.name}.", state)
            tracker.load_state_dict(self._movement.own_state(block, whole))
        states.load_stages(self._after, state)
        if self._action is not None:
            self._action.forget()
        self._num_steps = int(state["num_steps"])
        self._source.discard()
        self._source.arm(self._schedule.takes_samples(self._num_steps))

    def _rows_of(self, block: Block) -> slice:
        """Which of a block's own rows are held here."""
        return self._movement.split.rows_of(block, self._workers.rank)

    def _shard_of(self, block: Block) -> Shard:
        rows = self._rows_of(block)
        return Shard(block.dim, rows.start, rows.stop, self._workers.total)

    def _make_action(self) -> Action | None:
        """For the paper's tracker with one basis; else samples are always moved."""
        (first, *others), whole = self._trackers, self._blocks[0].dim
        alone = not others and whole == self._layout.dim
        if not alone or not isinstance(first, StreamingPower):
            return None
        return Action(first, self._movement, self._workers)

    def _columns(self) -> Iterator[tuple[slice, Tracker]]:
        """Which of the numbers held here belong to which tracker."""
        for block, tracker in zip(self._blocks, self._trackers, strict=True):
            rows = self._rows_of(block)
            start = block.start + rows.start - self._movement.held.start
            start = start if rows.start < rows.stop else 0
            yield slice(start, start + rows.stop - rows.start), tracker

    def _greet(self, rows: Tensor | None, gradient: Tensor) -> list[Greeting]:
        complete = nothing_but(rows, gradient) or (
            rows is not None and adds_up(rows, gradient)
        )
        mine = Greeting(
            step=self._num_steps,
            num_rows=0 if rows is None else len(rows),
            adds_up=complete,
            refused=False,
            has_gradient=has_gradient(self._layout),
        )
        return greet(self._workers, mine)

    def _turn(
        self, rows: Tensor | None, gradient: Tensor, everyone: Sequence[Greeting]
    ) -> tuple[Tensor, float | None]:
        """Turn the basis; what is held here of the average gradient, shape (n,).

        The second is what the samples' mean is multiplied by to give the gradient, None
        if it does not, or if that is not known.
        """
        counts, size = sample_counts(everyone), self._workers.size
        rows = gradient.new_empty(0, self._layout.dim) if rows is None else rows
        if not sum(counts) or self._acted(rows, counts):
            return self._movement.scattered(gradient, "gradient").div_(size), None
        shards = self._movement.samples(rows, counts)
        complete = all(greeting.adds_up for greeting in everyone)
        if complete:
            gradient = shards.sum(dim=0).div_(size)
        else:
            gradient = self._movement.scattered(gradient, "gradient").div_(size)
        even = self._update(shards, counts)
        scale = self._schedule.sample_scale(max(counts))
        known = sum(counts) / (scale * size) if complete and even else None
        return gradient, known

    def _acted(self, rows: Tensor, counts: Sequence[int]) -> bool:
        """Whether the basis was turned without moving samples."""
        if self._action is None or not self._action.is_cheaper(counts):
            return False
        return self._action.update(rows, counts, self._schedule.sample_scale(len(rows)))

    def _update(self, shards: Tensor, counts: Sequence[int]) -> bool:
        """Fold samples in; whether those of all workers have one factor."""
        scales = [self._schedule.sample_scale(n) for n in counts]
        scale = max(scales)
        even = all(s == scale for n, s in zip(counts, scales, strict=True) if n)
        if not even:
            # Each worker's mean loss divided by a number of samples of its own.
            factors = shards.new_tensor(scales)
            numbers = torch.tensor(counts, device=factors.device)
            shards.mul_(factors.repeat_interleave(numbers)[:, None])
            scale = 1.0
        for columns, tracker in self._columns():
            tracker.update(shards[:, columns], scale)
        if self._action is not None:
            self._action.forget()
        return even

    def _strength(self, gradient: Tensor) -> tuple[float, float]:
        """Norm of the average gradient, and how much of its part in U to remove."""
        squares = torch.linalg.vecdot(gradient, gradient).double()
        bad = gradient.isfinite().logical_not().sum().double()
        squares, bad = self._workers.total(squares, bad)
        # As in one process: what is not finite stays where it is, for the user to see.
        strength = self._schedule.strength_at(self._num_steps)
        return float(squares.sqrt()), 0.0 if bad > 0 else strength

    def _filtered(
        self, gradient: Tensor, strength: float, known: float | None
    ) -> Tensor:
        filtered = gradient.clone()
        for columns, tracker in self._columns():
            filtered[columns] = project(tracker, gradient[columns], strength, known)
        return filtered
