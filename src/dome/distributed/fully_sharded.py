"""The filter for a model of ``fully_shard`` (FSDP2): a worker filters what it holds.

Letters: D parameters, K directions, P workers. FSDP2 leaves worker p its part of the
averaged gradient; beside it lie the same numbers of every worker's own gradient (P,
D/P), which are the samples, and its rows of U (D/P, K). All that an update needs of the
others are sums of P K + P² numbers. Nothing of size D is ever brought together. Of
directions of low rank it holds what ``numerics/directions.py`` says.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dome import state as states
from dome.diagnostics import collect_stats
from dome.distributed.fully_shard_checks import check_supported, workers_of
from dome.distributed.handshake import (
    Handshake,
    check_same_options,
    sample_counts,
    shake_hands,
)
from dome.distributed.placement import Placement
from dome.distributed.reduce_scatter import Interception, sharded_modules
from dome.distributed.split_states import SplitBases, SplitDirections, State
from dome.distributed.traffic import DistributedStats
from dome.distributed.worker_rows import WorkerRows
from dome.distributed.workers import Workers
from dome.filter import make_tracker, norm_of
from dome.hooking import Hooked
from dome.masks import Masks
from dome.numerics.arithmetic import own_arithmetic
from dome.options import FilterOptions
from dome.parameters import Block, Layout
from dome.torch_private import fsdp_groups
from dome.trackers import Tracker


class FullyShardedFilter(Hooked):
    """``GradientFilter`` for a model of ``fully_shard``, split as its parameters are.

    All workers must call ``step()``, ``state_dict()``, ``full_state_dict()`` and
    ``load_state_dict()`` together. Each worker's gradient of a backward pass that
    reduces gradients is one sample.

    Args:
        model: The model; FSDP2's reduce-scatter is an all-to-all from now on.
        rank: Number of directions K, or numbers by layer, as for ``GradientFilter``.
        samples: "worker", the only one there is: no worker has a whole gradient.
        parameters: Filter only those of the model's parameters that are among these.
        **options: Those of ``GradientFilter`` but ``after`` and trackers of your own.
            The generator of the first worker counts.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | Mapping[str, int],
        *,
        samples: str = "worker",
        parameters: Iterable[Tensor] | None = None,
        **options: Any,  # noqa: ANN401 (FilterOptions names and checks them)
    ) -> None:
        super().__init__()
        options |= {"rank": rank, "samples": "microbatch"}
        self._options = FilterOptions.named("dome.distributed.attach", options)
        check_supported(model, samples, self._options)
        self._layout = Layout(model, self._options.layout, only=parameters)
        self._workers = Workers(workers_of(self._layout), self._layout.device)
        check_same_options(self._workers, self._options, self._layout)
        self._placement = Placement(self._layout, self._workers)
        generator = self._workers.agree_on(self._options.generator)
        self._options = replace(self._options, generator=generator)
        self._tracker = make_tracker(self._layout, self._options, self._placement.place)
        low_rank = self._options.direction_rank is not None
        split = SplitDirections if low_rank else SplitBases
        self._split = split(self._placement, self._tracker)
        self._rows = WorkerRows(model, self._layout, self._placement, self._workers)
        self._masks = Masks(self._layout, self._placement.columns)
        self._intercepted = [
            Interception(module, self._rows, self._workers)
            for module in sharded_modules(model)
            if fsdp_groups(module)
        ]
        # First of all: fully_shard gathers parameters in a hook of its own.
        arrived = model.register_forward_pre_hook(self._arrive, prepend=True)
        self.hook_into(arrived)
        self._num_steps = 0
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = 0.0

    @own_arithmetic
    def step(self) -> None:
        """Turn the basis towards the workers' gradients, filter ``.grad``."""
        start, step = time.perf_counter(), self._num_steps
        if self._workers.traffic.is_over:
            self._workers.traffic.begin_step()
        num_passes = self._shake_hands()
        rows = self._rows.take(num_passes)
        if rows is not None:
            self._tracker.update(rows, self._options.sample_scale(num_passes))
        self._filter_(self._options.strength_at(step))
        self._num_steps += 1
        self._rows.is_armed = self._options.takes_samples(self._num_steps)
        self._workers.traffic.is_over = True
        self._seconds = time.perf_counter() - start

    def detach(self) -> None:
        """Remove every hook; FSDP2 reduces by itself again. Can be called twice."""
        for intercepted in self._intercepted:
            intercepted.put_back()
        self._intercepted = []
        self._rows.detach()
        self._masks.detach()
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

    def state_dict(self) -> dict[str, Tensor]:
        """The state for ``torch.distributed.checkpoint``, the same whatever P is.

        Bases are in it as DTensors, one for each parameter and cut as it is, of the
        parameter's shape and one dimension more; nothing is gathered.
        """
        return self._state(self._split.for_checkpoint)

    def full_state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of a ``GradientFilter`` in one process, whatever P is.

        It is gathered on each worker, D K numbers; with ``only`` on that worker alone,
        and the others get an empty dictionary.
        """
        self._placement.receiver = only
        state = self._state(self._split.whole)
        return state if only in (None, self._workers.rank) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of either kind, of any number of workers."""
        states.check_model(self._layout, state)
        state = self._held(state)
        self._tracker.check_state(state)
        num_steps = states.count_in(state, "num_steps")
        self._tracker.load_state_dict(state)
        self._num_steps = num_steps
        self._rows.discard()
        self._rows.is_armed = self._options.takes_samples(self._num_steps)

    def _arrive(self, *_: object) -> None:
        self._workers.arrive(f"the forward pass of step {self._num_steps + 1}")

    def _shake_hands(self) -> int:
        """How many backward passes this step has samples of, on all workers alike."""
        mine = Handshake(
            step=self._num_steps,
            num_rows=self._rows.num_kept,
            adds_up=True,
            refused=self._rows.came_without,
            has_gradient=(),
        )
        everyone = shake_hands(self._workers, mine)
        if any(handshake.refused for handshake in everyone):
            raise RuntimeError(
                "gradients came that fully_shard did not reduce through the filter: "
                "attach again after anything that gives the model another "
                "reduce-scatter, or fill .grad by loss.backward() alone"
            )
        # A worker may take a gradient of zeros for one that was thrown away.
        return max(sample_counts(everyone))

    def _filter_(self, strength: float) -> None:
        """Take the part in U out of what is held here of the average gradient."""
        gradient = self._placement.gather()
        bad = gradient.isfinite().logical_not().sum().double()
        squares, bad = self._workers.total(norm_of(gradient).square(), bad)
        held = self._masks.find({0: gradient}, squares.sqrt())
        filtered = gradient
        if strength:
            # As in one process: what is not finite stays, for the user to see.
            projected = self._tracker.project_out(gradient, strength)
            filtered = torch.where(bad == 0, projected, gradient)
            if held is not None:
                filtered.masked_fill_(held, 0)
            self._placement.scatter_(filtered)
        (kept,) = self._workers.total(norm_of(filtered).square())
        self._norms = squares.sqrt(), kept.sqrt()

    @property
    def _blocks(self) -> list[Block]:
        """The blocks that have a basis."""
        tracked = self._tracker.by_name
        return [block for block in self._layout.blocks if block.name in tracked]

    def _state(self, of_block: Callable[[Block], State]) -> State:
        state = states.shapes_of(self._layout)
        for block in self._blocks:
            own = of_block(block)
            state |= states.with_prefix(f"{states.BLOCK}{block.name}.", own)
        state["num_steps"] = torch.tensor(self._num_steps)
        return state

    def _held(self, state: Mapping[str, Tensor]) -> State:
        """Of a state of any form, what is held here."""
        held = dict(state)
        for block in self._blocks:
            prefix = f"{states.BLOCK}{block.name}."
            own = states.below_prefix(prefix, held)
            for name in own:
                del held[f"{prefix}{name}"]
            held |= states.with_prefix(prefix, self._split.held(own, block))
        return held
