"""DDP without compression: every worker holds some rows of the basis U.

Letters: D parameters, K directions, P workers, B samples of all workers together. An
all-to-all brings worker p its columns of every sample, so that it holds G[:, p] (B,
D/P) and U[p] (D/P, K). All that an update needs of the others are sums of B K + B² or
K² numbers. The filtered gradient is gathered as DDP's own all-reduce ends.
"""

from collections.abc import Iterator, Sequence
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
from dome.parameters import Block, Layout, Slot
from dome.samples.protocol import is_compact
from dome.samples.store.group import large_tables
from dome.trackers.blocks import Samples
from dome.trackers.factors import FactorBatch
from dome.trackers.linalg import Shard
from dome.trackers.parts import Part, PartialRows, parts_of
from dome.world import (
    Attached,
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
        # Large embeddings, of which the words that samples have travel.
        large = {id(p) for p in large_tables(model.module)}
        pairs = zip(layout.parameters, layout.slots, strict=True)
        self._tables = [slot for p, slot in pairs if id(p) in large]
        if not is_compact(self.source):
            self._tables = []
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
        rows = g.new_empty(0, len(g)) if own is None else own
        if isinstance(rows, FactorBatch):
            raise TypeError("a split basis takes rows, not factors")
        mine = Handshake(step, len(rows), adds_up=adds_up(_total(rows), g))
        everyone = shake_hands(self._workers, mine, self.layout, self.masks)
        counts = [other.num_rows for other in everyone]
        if not sum(counts):
            return None, 0.0
        kept = self._columns(rows) if self._tables else None
        G: Tensor | PartialRows
        if kept is None:
            rows = rows if isinstance(rows, Tensor) else rows.written_out()
            G = self._split.samples(rows, counts)
        else:
            G = self._split.some_samples(rows, counts, kept, self._tables)
        if all(other.adds_up for other in everyone):
            self._mean = _total(G).div_(self._workers.size)
        return G, self._scale_(G, counts)

    def _columns(self, rows: Tensor | PartialRows) -> Tensor | None:
        """Columns in which some worker may have more than zeros; None for all.

        Workers tell each other the words that their samples have.
        """
        own = {part.columns.start: part for part in parts_of(rows)}
        used = []
        for slot in self._tables:
            part, has_all = own.get(slot.start), len(rows) > 0
            flags = torch.zeros(
                slot.shape[0], dtype=torch.uint8, device=self.layout.device
            )
            if part is not None and part.words is not None:
                flags[part.words] = 1
            elif has_all:
                flags.fill_(1)
            used.append(flags)
        whole = torch.cat(used)
        self._workers.unite_(whole)
        kept = torch.ones(self.layout.dim, dtype=torch.bool, device=whole.device)
        for slot, flags in zip(
            self._tables, whole.split([len(f) for f in used]), strict=True
        ):
            if 2 * int(flags.sum()) <= len(flags):
                kept[slot.start : slot.stop] = flags.bool().repeat_interleave(
                    slot.shape[1]
                )
        return None if bool(kept.all()) else kept.nonzero()[:, 0]

    def _scale_(self, G: Tensor | PartialRows, counts: Sequence[int]) -> float:
        """The factor that is left after each worker's rows got what differs."""
        scales = [self.options.sample_scale(n) for n in counts]
        if len({s for n, s in zip(counts, scales, strict=True) if n}) == 1:
            return max(scales)
        # Each worker's mean loss was divided by a number of its own.
        for part in parts_of(G):
            numbers = torch.tensor(counts, device=part.rows.device)
            each = part.rows.new_tensor(scales).repeat_interleave(numbers)
            part.rows.mul_(each[:, None])
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


def _total(rows: Tensor | PartialRows) -> Tensor:
    """The sum of rows, shape (D,)."""
    return rows.sum(dim=0) if isinstance(rows, Tensor) else rows.total()


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

    def some_samples(
        self,
        rows: Tensor | PartialRows,
        counts: Sequence[int],
        kept: Tensor,
        tables: Sequence[Slot],
    ) -> PartialRows:
        """The same of some columns alone.

        Args:
            rows: This worker's, shape (B_p, D).
            counts: B_p of every worker.
            kept: Which columns travel, in order, shape (n,); all but those of words.
            tables: The large embeddings, in order.
        """
        if isinstance(rows, Tensor):  # no samples
            own = rows.new_empty(0, len(kept))
        else:
            own = rows.of_columns(kept)
        edges = kept.new_tensor([part.stop for part in self.ranges])
        ends = torch.searchsorted(kept, edges).tolist()
        firsts = [0, *ends[:-1]]
        parts = [own[:, i:j] for i, j in zip(firsts, ends, strict=True)]
        first, end = firsts[self._workers.rank], ends[self._workers.rank]
        num = end - first
        arrived = self._workers.exchange(parts, [n * num for n in counts], "samples")
        G = arrived.view(sum(counts), num)
        return PartialRows(tuple(self._parts(G, kept[first:end], tables)))

    def _parts(self, G: Tensor, kept: Tensor, tables: Sequence[Slot]) -> Iterator[Part]:
        """Columns that are kept, as parts of those that are held here."""
        start, stop = self.held.start, self.held.stop
        inside = [(max(t.start, start), min(t.stop, stop)) for t in tables]
        # Ranges of all columns between embeddings, and of those of embeddings.
        edges = [
            start,
            *(edge for pair in inside if pair[0] < pair[1] for edge in pair),
        ]
        edges.append(stop)
        places = torch.searchsorted(kept, kept.new_tensor(edges)).tolist()
        for i in range(len(edges) - 1):
            columns = slice(edges[i] - start, edges[i + 1] - start)
            rows, ids = G[:, places[i] : places[i + 1]], kept[places[i] : places[i + 1]]
            if columns.start < columns.stop or len(edges) == 2:
                # A worker's columns may end inside of a word: each counts as one.
                is_table = i % 2 == 1 and len(ids) < columns.stop - columns.start
                words = ids - edges[i] if is_table else None
                yield Part(rows, columns, words)

    def scattered(self, vector: Tensor, kind: str) -> Tensor:
        """Of the sum of vectors (D,) over workers, the part held here, (n,)."""
        filled = pad(vector, (0, self.length * self._workers.size - self._dim))
        return self._workers.scatter_sum(filled, kind)[: self.num_held]

    def whole(self, part: Tensor, kind: str) -> Tensor:
        """The whole vector (D,) of the parts that workers hold, (n,)."""
        filled = pad(part, (0, self.length - len(part)))
        return self._workers.gather(filled, kind)[: self._dim]
