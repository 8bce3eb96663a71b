"""The filter over workers without compression: every worker holds rows of U.

Letters: D parameters, K directions, P workers, B samples of all workers together. An
all-to-all brings worker p its columns of every sample, so that it holds G[:, p] (B,
D/P) beside U[p] (D/P, K). All that an update needs of the others are sums of B K + B²
or K² numbers; the filtered gradient is gathered as DDP's own all-reduce ends.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome import state as states
from dome.diagnostics import collect_stats
from dome.distributed.covariance_action import ActionSamples, WholeBasis, is_cheaper
from dome.distributed.handshake import (
    Handshake,
    adds_up,
    check_same_options,
    has_gradient,
    make_room,
    refuse_stream,
    sample_counts,
    shake_hands,
)
from dome.distributed.local import LocalGradients, check_switchable
from dome.distributed.resharding import Resharding
from dome.distributed.traffic import DistributedStats
from dome.distributed.workers import Workers
from dome.filter import make_tracker, norm_of, pass_through
from dome.hooking import Hooked
from dome.masks import Masks, is_zero
from dome.numerics.arithmetic import own_arithmetic
from dome.options import FilterOptions, signature_of
from dome.parameters import Layout
from dome.trackers import Tracker

SOURCES = {"per_sample": "per_sample", "worker": "microbatch"}


def source_named(samples: str) -> str:
    """What a worker's own source of samples is called; refused if there is none."""
    if samples not in SOURCES:
        raise ValueError(f"samples must be one of {tuple(SOURCES)}, got {samples!r}")
    return SOURCES[samples]


class ShardedFilter(Hooked):
    """``GradientFilter`` for a DDP model, with its basis split over the workers.

    All workers must call ``step()``, ``state_dict()`` and ``load_state_dict()``
    together. Until ``step()`` a worker's ``.grad`` is its own; then it is the filtered
    average over workers, the same on all.

    Args:
        model: The DDP model; its own communication is off from now on.
        rank: Number of directions K, or numbers by layer, as for ``GradientFilter``.
        samples: "per_sample", or "worker": each worker's local gradient is one sample,
            or with gradient accumulation each of its micro-batches.
        parameters: Filter only those of the model's parameters that are among these.
        **options: Those of ``GradientFilter``. A tracker of your own is a function
            (dim, rank, shard) -> tracker; the generator of the first worker counts;
            ``after`` runs on every worker alike.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        rank: int | Mapping[str, int],
        *,
        samples: str = "per_sample",
        parameters: Iterable[Tensor] | None = None,
        **options: Any,  # noqa: ANN401 (FilterOptions names and checks them)
    ) -> None:
        super().__init__()
        options |= {"rank": rank, "samples": source_named(samples)}
        self._options = FilterOptions.named("dome.distributed.attach", options)
        refuse_stream(self._options)
        check_switchable(model)
        self._layout = Layout(model.module, self._options.layout, only=parameters)
        self._workers = Workers(model.process_group, self._layout.device)
        check_same_options(self._workers, self._options, self._layout)
        self._resharding = Resharding(self._layout.dim, self._workers)
        generator = self._workers.agree_on(self._options.generator)
        self._options = replace(self._options, generator=generator)
        self._tracker = make_tracker(
            self._layout, self._options, self._resharding.place
        )
        self._whole = WholeBasis(self._resharding)
        self._source = self._options.source_for(model.module, self._layout)
        self._masks = Masks(self._layout)
        self._local = LocalGradients(model, self._workers)
        self._gradient_bytes = self._layout.dim * self._layout.dtype.itemsize
        self._num_steps = 0
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = 0.0

    __signature__ = signature_of(leading=("model", "rank"), more=("parameters",))

    @own_arithmetic
    def step(self) -> None:
        """Average the gradients of all workers, turn the basis, filter ``.grad``."""
        start, step = time.perf_counter(), self._num_steps
        self._local.check()
        self._workers.traffic.begin_step()
        self._workers.traffic.reduced_by_ddp(self._gradient_bytes)
        rows = self._source.take() if self._options.takes_samples(step) else None
        gradient = self._layout.gather()
        everyone = self._shake_hands(rows, gradient)
        make_room(self._layout, everyone)
        gradient = self._turn(rows, gradient, everyone)
        whole = self._filtered(gradient, self._options.strength_at(step))
        self._layout.scatter_(pass_through(self._options.stages, whole))
        self._local.send_buffers()
        self._num_steps += 1
        self._source.arm(self._options.takes_samples(self._num_steps))
        self._seconds = time.perf_counter() - start

    def detach(self) -> None:
        """Remove every hook; DDP averages gradients again. Can be called twice."""
        self._source.detach()
        self._masks.detach()
        self._local.release()
        super().detach()

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block, holding this worker's rows of its basis."""
        return dict(self._tracker.by_name)

    @property
    def stats(self) -> DistributedStats:
        """What the last step did and sent. Computed when asked for, by any worker."""
        trackers = list(self.trackers.values())
        base = collect_stats(trackers, self._num_steps, self._norms, self._seconds)
        return self._workers.traffic.stats(base)

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of a ``GradientFilter`` in one process, whatever P is.

        All workers must call it. It is gathered on each, D K numbers; with ``only`` on
        that worker alone, and the others get an empty dictionary.
        """
        self._resharding.receiver = only
        state = states.shapes_of(self._layout) | self._tracker.state_dict()
        state |= self._masks.state_dict()
        state["num_steps"] = torch.tensor(self._num_steps)
        state |= states.stages(self._options.stages)
        return state if only in (None, self._workers.rank) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, of any number of workers or of one process."""
        states.check_model(self._layout, state)
        self._tracker.check_state(state)
        self._masks.check_state(state)
        num_steps = states.count_in(state, "num_steps")
        # Whatever is refused is refused before anything is changed.
        states.load_stages(self._options.stages, state)
        self._tracker.load_state_dict(state)
        self._masks.load_state_dict(state)
        self._whole.forget()
        self._num_steps = num_steps
        self._source.discard()
        self._source.arm(self._options.takes_samples(self._num_steps))

    def _shake_hands(self, rows: Tensor | None, gradient: Tensor) -> list[Handshake]:
        masked = self._masks.has_news()
        mine = Handshake(
            step=self._num_steps,
            num_rows=0 if rows is None else len(rows),
            adds_up=not masked and self._adds_up(rows, gradient),
            refused=False,
            has_gradient=has_gradient(self._layout),
            masked=masked,
        )
        everyone = shake_hands(self._workers, mine)
        if any(handshake.masked for handshake in everyone):
            self._masks.share(self._workers.unite_)
        return everyone

    def _adds_up(self, rows: Tensor | None, gradient: Tensor) -> bool:
        # What a mask takes out is still in the samples, however little it is.
        return self._masks.held is None and adds_up(rows, gradient)

    def _turn(
        self, rows: Tensor | None, gradient: Tensor, everyone: Sequence[Handshake]
    ) -> Tensor:
        """Turn the basis; what is held here of the average gradient, shape (n,)."""
        counts, size = sample_counts(everyone), self._workers.size
        rows = gradient.new_empty(0, self._layout.dim) if rows is None else rows
        if sum(counts) and not self._acted(rows, counts):
            shards = self._resharding.samples(rows, counts)
            complete = all(handshake.adds_up for handshake in everyone)
            held = shards.sum(dim=0).div_(size) if complete else None
            self._update(shards, counts)
            if held is not None:
                return held
        return self._resharding.scattered(gradient, "gradient").div_(size)

    def _acted(self, rows: Tensor, counts: Sequence[int]) -> bool:
        """Whether the basis was turned without moving samples."""
        num_columns, size = self._tracker.columns_for_actions, self._workers.size
        if not num_columns or not is_cheaper(num_columns, sum(counts), size):
            return False
        samples = ActionSamples(
            rows,
            counts,
            [self._options.sample_scale(n) for n in counts],
            self._whole,
            self._resharding,
            self._workers,
        )
        self._tracker.update_by_action(samples)
        return True

    def _update(self, shards: Tensor, counts: Sequence[int]) -> None:
        """Fold samples in; each worker's mean loss divided by a number of its own."""
        scales = [self._options.sample_scale(n) for n in counts]
        even = len({s for n, s in zip(counts, scales, strict=True) if n}) == 1
        if not even:
            factors = shards.new_tensor(scales)
            numbers = torch.tensor(counts, device=factors.device)
            shards.mul_(factors.repeat_interleave(numbers)[:, None])
        self._tracker.update(shards, max(scales) if even else 1.0)
        self._whole.forget()

    def _filtered(self, gradient: Tensor, strength: float) -> Tensor:
        """The average gradient without its part in U, whole, shape (D,)."""
        squares = gradient.double().square().sum()
        bad = gradient.isfinite().logical_not().sum().double()
        squares, bad = self._workers.total(squares, bad)
        filtered = gradient
        if strength:
            # As in one process: what is not finite stays, for the user to see.
            projected = self._tracker.project_out(gradient, strength)
            filtered = torch.where(bad == 0, projected, gradient)
            if self._masks.held is not None:
                held = self._masks.held[self._resharding.held] & is_zero(gradient)
                filtered.masked_fill_(held, 0)
        whole = self._resharding.whole(filtered, "gradient")
        self._masks.settle(whole)
        self._norms = squares.sqrt(), norm_of(whole)
        return whole
