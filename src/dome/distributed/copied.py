"""DDP with ``direction_rank``: every worker holds all directions, samples stay local.

Shapes: K directions of rank r, a weight (n, m), P workers. All that an update needs of
samples are sums over them: of coordinates (K numbers), of their products with each
other (K²), and of the thin products that become the new directions, K r (n + m) for
each weight. These are added up over workers, and all continue with the same bits, which
is what one process would compute from the whole batch. The gradient is averaged as in
DDP.

Directions are copied, not split: each worker needs all of P and Q for its own samples,
so that split ones would have to be gathered at every update, as many bytes again as
the sums take, to save a few per cent of the model's memory.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome.distributed.handshake import Handshake, shake_hands
from dome.distributed.local import LocalGradients
from dome.distributed.workers import Workers
from dome.masks import Masks, is_zero
from dome.options import FilterOptions
from dome.parameters import Block, Layout
from dome.trackers.blocks import Samples
from dome.trackers.factors import FactorBatch
from dome.trackers.linalg import alone
from dome.world import (
    Attached,
    State,
    all_of,
    make_tracker,
    pass_through,
)


class CopiedDirections:
    """The world of a DDP model whose workers all hold the same directions.

    Args:
        model: The DDP model; its own communication is off from now on.
        layout: Its parameters that are filtered.
        options: What the filter does.
        workers: The P workers.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        layout: Layout,
        options: FilterOptions,
        workers: Workers,
    ) -> None:
        self.layout, self.options, self._workers = layout, options, workers

        def place(block: Block) -> tuple[slice, dict[str, Any]]:
            return slice(block.start, block.stop), {"total": workers.total}

        workers.agree_on(options.generator)
        self.tracker = make_tracker(layout, options, place)
        self.source = options.source_for(model.module, layout)
        self.masks = Masks(layout)
        self._local = LocalGradients(model, workers, layout, options.update_every)
        self.attached: Sequence[Attached] = (self.source, self.masks, self._local)
        self.total, self.stats, self.held = alone, workers.stats, all_of

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """This worker's samples, none of them if only others have some."""
        self._local.begin_step()
        own = FactorBatch(0, {}) if own is None else own
        mine = Handshake(step, len(own))
        everyone = shake_hands(self._workers, mine, self.layout, self.masks)
        if not any(other.num_rows for other in everyone):
            return None, 0.0
        # Each worker's mean loss was divided by a number of its own.
        return own, self.options.sample_scale(len(own))

    def gradient(self) -> Tensor:
        """The average gradient over workers, shape (D,)."""
        g = self.layout.gather()
        self._workers.add_up_(g, "gradient")
        return g.div_(self._workers.size)

    def zeros(self, g: Tensor, norm: Tensor) -> Tensor | None:
        """The entries of g that a mask of some worker holds at zero, shape (D,)."""
        del norm
        self.masks.settle(g)
        held = self.masks.held
        return None if held is None else held & is_zero(g)

    def put_(self, filtered: Tensor) -> None:
        """Write the filtered gradient into ``.grad``, through ``after``."""
        self.layout.scatter_(pass_through(self.options.stages, filtered))
        self._local.end_step()

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of the trackers, the same on every worker."""
        del whole
        if only not in (None, self._workers.rank):
            return None
        return self.tracker.state_dict() | self.masks.state_dict()
