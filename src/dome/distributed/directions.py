"""Directions of low rank across workers: every worker holds them, samples stay local.

Shapes: K directions of rank r, a weight (n, m), P workers. All that an update needs of
samples are sums over them: of coordinates (K numbers), of their products with each
other (K²), and of the thin products that become the new directions, K r (n + m) for
each weight. These are added up over workers, and all go on with the same bits; it is
what one process would compute from the whole batch. The gradient is averaged as in DDP.

Directions are copied, not split: each worker needs all of P and Q for its own samples,
so that split ones would have to be gathered at every update, as many bytes again as
the sums take, to save a few per cent of the model's memory.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome import state as states
from dome.diagnostics import collect_stats
from dome.distributed.handshake import (
    Handshake,
    check_same_options,
    has_gradient,
    make_room,
    sample_counts,
    shake_hands,
)
from dome.distributed.local import LocalGradients, check_switchable
from dome.distributed.sharded import source_named
from dome.distributed.traffic import DistributedStats
from dome.distributed.workers import Workers
from dome.filter import is_finite, make_tracker, norm_of, pass_through
from dome.hooking import Hooked
from dome.masks import Masks, is_zero
from dome.numerics.arithmetic import own_arithmetic
from dome.numerics.factors import FactorBatch
from dome.options import FilterOptions, signature_of
from dome.parameters import Layout
from dome.samples.protocol import gives_factors
from dome.trackers import Tracker


class DirectionsFilter(Hooked):
    """``GradientFilter`` with ``direction_rank`` for a DDP model.

    All workers must call ``step()`` and ``load_state_dict()`` together. Until
    ``step()`` a worker's ``.grad`` is its own; then it is the filtered average over
    workers, the same on all.

    Args:
        model: The DDP model; its own communication is off from now on.
        rank: Number of directions K, or numbers by layer, as for ``GradientFilter``.
        samples: "per_sample", or "worker": each worker's local gradient is one sample,
            or with gradient accumulation each of its micro-batches.
        parameters: Filter only those of the model's parameters that are among these.
        **options: Those of ``GradientFilter``, ``direction_rank`` among them.
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
        check_switchable(model)
        self._layout = Layout(model.module, self._options.layout, only=parameters)
        self._workers = Workers(model.process_group, self._layout.device)
        check_same_options(self._workers, self._options, self._layout)
        generator = self._workers.agree_on(self._options.generator)
        self._options = replace(self._options, generator=generator)
        self._tracker = make_tracker(
            self._layout, self._options, total=self._workers.total
        )
        self._source = self._options.source_for(model.module, self._layout)
        self._masks = Masks(self._layout)
        self._local = LocalGradients(model, self._workers)
        self._num_steps = 0
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = 0.0

    __signature__ = signature_of(leading=("model", "rank"), more=("parameters",))

    @own_arithmetic
    def step(self) -> None:
        """Turn the directions, average the gradients of all workers, filter them."""
        start, step = time.perf_counter(), self._num_steps
        self._local.check()
        self._workers.traffic.begin_step()
        num_bytes = self._layout.dim * self._layout.dtype.itemsize
        self._workers.traffic.reduced_by_ddp(num_bytes)
        batch = self._take() if self._options.takes_samples(step) else None
        everyone = shake_hands(self._workers, self._handshake(batch))
        if any(handshake.masked for handshake in everyone):
            self._masks.share(self._workers.unite_)
        make_room(self._layout, everyone)
        if sum(sample_counts(everyone)):
            batch = FactorBatch(0, {}) if batch is None else batch
            # Each worker's mean loss divided by a number of its own.
            self._tracker.update(batch, self._options.sample_scale(len(batch)))
        gradient = self._layout.gather()
        self._workers.add_up_(gradient, "gradient")
        gradient.div_(self._workers.size)
        self._scatter_filtered(gradient, self._options.strength_at(step))
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
        """The tracker of each block, the same on every worker."""
        return dict(self._tracker.by_name)

    @property
    def stats(self) -> DistributedStats:
        """What the last step did and sent. Computed when asked for, by any worker."""
        trackers = list(self.trackers.values())
        base = collect_stats(trackers, self._num_steps, self._norms, self._seconds)
        return self._workers.traffic.stats(base)

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of a ``GradientFilter`` in one process, whatever P is.

        With ``only`` on that worker alone; the others get an empty dictionary.
        """
        if only not in (None, self._workers.rank):
            return {}
        state = states.shapes_of(self._layout) | self._tracker.state_dict()
        state |= self._masks.state_dict()
        state["num_steps"] = torch.tensor(self._num_steps)
        return state | states.stages(self._options.stages)

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
        self._num_steps = num_steps
        self._source.discard()
        self._source.arm(self._options.takes_samples(self._num_steps))

    def _take(self) -> Tensor | FactorBatch | None:
        if gives_factors(self._source):
            return self._source.take_factors()
        return self._source.take()

    def _handshake(self, batch: Tensor | FactorBatch | None) -> Handshake:
        return Handshake(
            step=self._num_steps,
            num_rows=0 if batch is None else len(batch),
            adds_up=False,
            refused=False,
            has_gradient=has_gradient(self._layout),
            masked=self._masks.has_news(),
        )

    def _scatter_filtered(self, g: Tensor, strength: float) -> None:
        filtered = g
        self._masks.settle(g)
        if strength:
            # As in one process: what is not finite stays, for the user to see.
            projected = self._tracker.project_out(g, strength)
            filtered = torch.where(is_finite(g), projected, g)
            if self._masks.held is not None:
                filtered.masked_fill_(self._masks.held & is_zero(g), 0)
        self._norms = norm_of(g), norm_of(filtered)
        self._layout.scatter_(pass_through(self._options.stages, filtered))
