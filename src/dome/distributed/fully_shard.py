"""The world of ``fully_shard`` (FSDP2): a worker filters what it holds.

Letters: D parameters, K directions, P workers. FSDP2 leaves worker p its part of the
averaged gradient; beside it lie the same numbers of every worker's own gradient (P,
D/P), which are the samples, and its rows of U (D/P, K). All that an update needs of the
others are sums of P K + P² numbers. Nothing of size D is ever brought together. Of
directions of low rank it holds what ``trackers/directions.py`` says.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dome.distributed.fully_shard_checks import check_supported, workers_of
from dome.distributed.handshake import Handshake, check_same_options, shake_hands
from dome.distributed.placement import Placement
from dome.distributed.reduce_scatter import AllToAll, sharded_modules
from dome.distributed.split_states import SplitStates
from dome.distributed.worker_rows import WorkerRows
from dome.distributed.workers import Workers
from dome.masks import Masks
from dome.options import FilterOptions
from dome.parameters import Layout
from dome.samples import SampleSource
from dome.torch_private import fsdp_groups
from dome.trackers.blocks import Samples
from dome.world import Attached, State, make_tracker


class FullyShard:
    """The world of a model of ``fully_shard``, split as its parameters are.

    Each worker's gradient of a backward pass that reduces gradients is one sample.

    Args:
        model: The model; FSDP2's reduce-scatter is an all-to-all from now on.
        parameters: Those of an optimizer, which are filtered.
        options: What the filter does, without ``after`` and trackers of the user's.
        samples: "worker", the only one there is: no worker has a whole gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor],
        options: FilterOptions,
        samples: str,
    ) -> None:
        check_supported(model, samples, options)
        layout = Layout(model, options.layout, only=parameters)
        workers = Workers(workers_of(layout), layout.device)
        check_same_options(workers, options, layout)
        self.layout, self.options, self._workers = layout, options, workers
        self._placement = Placement(layout, workers)
        workers.agree_on(options.generator)
        self.tracker = make_tracker(layout, options, self._placement.place)
        self._states = SplitStates(layout, self._placement, self.tracker)
        self._rows = WorkerRows(model, layout, self._placement, workers)
        self.source: SampleSource = self._rows
        self.masks = Masks(layout, self._placement.columns)
        intercepted = [
            AllToAll(module, self._rows, workers)
            for module in sharded_modules(model)
            if fsdp_groups(module)
        ]
        self.attached: Sequence[Attached] = (self._rows, self.masks, *intercepted)
        self.total, self.stats = workers.total, workers.stats

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """All workers' rows of the numbers held here, shape (P · passes, n)."""
        del own
        if self._workers.is_over:
            self._workers.begin_step()
        rows = self._rows
        mine = Handshake(step, rows.num_kept, refused=rows.came_without)
        everyone = shake_hands(self._workers, mine)
        if any(other.refused for other in everyone):
            raise RuntimeError(
                "gradients were reduced without the filter: if something set another "
                "reduce-scatter, attach again after it, and fill .grad by "
                "loss.backward() alone"
            )
        # A worker may take a gradient of zeros for one that was thrown away.
        num_passes = max(other.num_rows for other in everyone)
        return rows.newest(num_passes), self.options.sample_scale(num_passes)

    def gradient(self) -> Tensor:
        """The part of the average gradient that FSDP2 left here, shape (n,)."""
        return self._placement.gather()

    def zeros(self, g: Tensor, norm: Tensor) -> Tensor | None:
        """The entries of g that a mask holds at zero, shape (n,)."""
        held = self.masks.find({0: g}, norm)
        # Never None: where one worker holds some, all add up their norms again.
        return torch.zeros_like(g, dtype=torch.bool) if held is None else held

    def put_(self, filtered: Tensor) -> None:
        """Write the part of the filtered gradient that is held here into ``.grad``."""
        self._placement.scatter_(filtered)
        self._workers.is_over = True

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of the trackers: with DTensors, or gathered."""
        if only is not None and not whole:
            raise ValueError(
                "state_dict() of fully_shard has DTensors, and each worker its part: "
                "call full_state_dict(only=...) for the state on one worker"
            )
        state = self._states.whole(only) if whole else self._states.for_checkpoint()
        return state if only in (None, self._workers.rank) else None

    def held(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part of a state that is held here, of one process or with DTensors."""
        held = self._states.held(state)
        held.pop("held", None)  # of masks, which are found again at the next step
        return held
