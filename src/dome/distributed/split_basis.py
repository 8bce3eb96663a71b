"""DDP without compression: every worker holds some rows of the basis U.

Letters: D parameters, K directions, P workers, B samples of all workers together. An
all-to-all brings worker p its columns of every sample, so that it holds G[:, p] (B,
D/P) and U[p] (D/P, K). All that an update needs of the others are sums of B K + B² or
K² numbers. The filtered gradient is gathered as DDP's own all-reduce ends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from dome.distributed.handshake import Handshake, adds_up, shake_hands
from dome.distributed.local import LocalGradients
from dome.distributed.workers import Workers
from dome.masks import Masks, is_zero
from dome.options import FilterOptions
from dome.parameters import Block, Layout
from dome.trackers.linalg import Shard
from dome.trackers.parts import PartialRows
from dome.world import (
    Attached,
    Samples,
    State,
    all_of,
    make_tracker,
    pass_through,
)


class SplitBasis:
    """The world of a DDP model whose basis is split over the workers.

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
        self._split = Split(layout.dim, workers)
        workers.agree_on(options.generator)
        self.tracker = make_tracker(layout, options, self._split.place)
        self.source = options.source_for(model.module, layout)
        self.masks = Masks(layout)
        self._local = LocalGradients(model, workers, layout, options.update_every)
        self.attached: Sequence[Attached] = (self.source, self.masks, self._local)
        self.total, self.stats, self.held = workers.total, workers.stats, all_of
        # This worker's gradient; its part of the average, if samples brought that.
        self._own: Tensor | None = None
        self._mean: Tensor | None = None

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """All workers' samples in the columns held here, shape (B, D/P)."""
        self._local.begin_step()
        g = self._own = self.layout.gather()
        if isinstance(own, PartialRows):
            own = own.written_out()
        rows = own if isinstance(own, Tensor) else g.new_empty(0, len(g))
        mine = Handshake(step, len(rows), adds_up=adds_up(rows, g))
        everyone = shake_hands(self._workers, mine, self.layout, self.masks)
        counts = [other.num_rows for other in everyone]
        if not sum(counts):
            return None, 0.0
        G = self._split.samples(rows, counts)
        if all(other.adds_up for other in everyone):
            self._mean = G.sum(dim=0).div_(self._workers.size)
        return G, self._scale_(G, counts)

    def _scale_(self, G: Tensor, counts: Sequence[int]) -> float:
        """The factor that is left after each worker's rows got what differs."""
        scales = [self.options.sample_scale(n) for n in counts]
        if len({s for n, s in zip(counts, scales, strict=True) if n}) == 1:
            return max(scales)
        # Each worker's mean loss was divided by a number of its own.
        numbers = torch.tensor(counts, device=G.device)
        G.mul_(G.new_tensor(scales).repeat_interleave(numbers)[:, None])
        return 1.0

    def gradient(self) -> Tensor:
        """The part of the average gradient that is held here, shape (D/P,)."""
        mean, own, self._mean, self._own = self._mean, self._own, None, None
        if mean is None:
            own = self.layout.gather() if own is None else own
            mean = self._split.scattered(own, "gradient").div_(self._workers.size)
        return mean

    def zeros(self, g: Tensor, norm: Tensor) -> Tensor | None:
        """The entries of g that a mask of some worker holds at zero, shape (D/P,)."""
        del norm
        held = self.masks.held
        return None if held is None else held[self._split.held] & is_zero(g)

    def put_(self, filtered: Tensor) -> None:
        """Write the whole filtered gradient into ``.grad``, through ``after``."""
        whole = self._split.whole(filtered, "gradient")
        self.masks.settle(whole)
        self.layout.scatter_(pass_through(self.options.stages, whole))
        self._local.end_step()

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of the trackers, whose rows are collected from all workers."""
        del whole
        self._split.receiver = only
        state = self.tracker.state_dict() | self.masks.state_dict()
        return state if only in (None, self._workers.rank) else None


class Split:
    """D numbers in P ranges of equal length, the last ones shorter or empty.

    Args:
        dim: D.
        workers: The P workers.
    """

    def __init__(self, dim: int, workers: Workers) -> None:
        self._dim, self._workers = dim, workers
        self.length = -(-dim // workers.size)  # of a worker, the last ones filled up
        starts = [min(p * self.length, dim) for p in range(workers.size)]
        self.ranges = [slice(s, min(s + self.length, dim)) for s in starts]
        self.held = self.ranges[workers.rank]
        self.num_held = self.held.stop - self.held.start
        # Who collects the rows of bases; None for all.
        self.receiver: int | None = None

    def place(self, block: Block) -> tuple[slice, dict[str, Any]]:
        """Which of the numbers held here are a block's, and which of its rows."""
        parts = []
        for held in self.ranges:
            first = min(max(held.start, block.start), block.stop)
            last = max(min(held.stop, block.stop), first)
            parts.append(slice(first - block.start, last - block.start))
        rows = parts[self._workers.rank]
        lengths = [part.stop - part.start for part in parts]

        def collect(tensor: Tensor) -> Tensor:
            return self._workers.collect(tensor, lengths, "basis", self.receiver)

        shard = Shard(block.dim, (rows,), self._workers.total, collect)
        start = max(block.start + rows.start - self.held.start, 0)
        return slice(start, start + shard.num_rows), {"shard": shard}

    def samples(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in the columns held here, shape (B, n), worker by worker.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
        """
        parts = [rows[:, part] for part in self.ranges]
        lengths = [num_rows * self.num_held for num_rows in counts]
        arrived = self._workers.exchange(parts, lengths, "samples")
        return arrived.view(sum(counts), self.num_held)

    def scattered(self, vector: Tensor, kind: str) -> Tensor:
        """Of the sum of vectors (D,) over workers, the part held here, (n,)."""
        filled = pad(vector, (0, self.length * self._workers.size - self._dim))
        return self._workers.scatter_sum(filled, kind)[: self.num_held]

    def whole(self, part: Tensor, kind: str) -> Tensor:
        """The whole vector (D,) of the parts that workers hold, (n,)."""
        filled = pad(part, (0, self.length - len(part)))
        return self._workers.gather(filled, kind)[: self._dim]
