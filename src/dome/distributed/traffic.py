"""Bytes that a worker sends, counted as they go, against what DDP would have sent.

For a model of ``fully_shard`` the comparison is FSDP2's reduce-scatter, (P − 1)/P n.

Letters: D numbers in the gradient, P workers. A ring all-reduce of n bytes sends
2 (P − 1)/P n from every worker, an all-gather of n bytes a worker (P − 1) n, an
all-to-all all but a worker's own part, and a broadcast n from all but the last. Frames
of the network below are not counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from dome.diagnostics import FilterStats

# What bytes may be for.
KINDS = ("control", "sums", "samples", "gradient", "messages", "basis", "buffers")


@dataclass(frozen=True, slots=True)
class DistributedStats(FilterStats):
    """What the last step did, and what this worker has sent for it.

    With a compressor every worker has a filter of its own, and its numbers are those of
    this worker; without one they are the same on all.

    Attributes:
        worker: Which worker this is.
        num_workers: P.
        sent: Bytes sent in the last step, by what they were for: "control" (who has
            samples and gradients), "sums" (small matrices), "samples", "gradient",
            "messages" (of a compressor), "basis" (synchronisation, checkpoints) and
            "buffers" (of the model, where DDP sends them too).
        bytes_sent: All of them.
        total_bytes_sent: The same since the beginning, checkpoints included.
        ddp_bytes: What the gradient would have cost in this step without a filter: by
            DDP's ring all-reduce, which sends buffers besides, or by FSDP2's
            reduce-scatter, which gathers parameters besides.
        total_ddp_bytes: The same for all steps since the beginning.
    """

    worker: int
    num_workers: int
    sent: Mapping[str, int]
    bytes_sent: int
    total_bytes_sent: int
    ddp_bytes: int
    total_ddp_bytes: int

    @property
    def share_of_ddp(self) -> float:
        """All bytes sent over all that DDP would have sent."""
        return self.total_bytes_sent / max(1, self.total_ddp_bytes)


class Traffic:
    """Counts the bytes that one of P workers sends.

    Args:
        worker: Which worker this is.
        num_workers: P.
    """

    def __init__(self, worker: int, num_workers: int) -> None:
        self._worker, self._num_workers = worker, num_workers
        self._step: Counter[str] = Counter()
        self._total = 0
        self._plain = self._total_plain = 0
        self.is_over = True  # the step that was counted last

    def begin_step(self) -> None:
        """Start to count anew what a step sends."""
        self._step.clear()
        self._plain, self.is_over = 0, False

    def count_plain(self, num_bytes: int) -> None:
        """Bytes that this worker would have sent without a filter."""
        self._plain += num_bytes
        self._total_plain += num_bytes

    def count(self, kind: str, num_bytes: int) -> None:
        """Bytes that this worker has sent to others."""
        self._step[kind] += num_bytes
        self._total += num_bytes

    def all_reduced(self, kind: str, num_bytes: int) -> None:
        """A ring all-reduce of so many bytes."""
        self.count(kind, ring_bytes(num_bytes, self._num_workers))

    def reduced_by_ddp(self, num_bytes: int) -> None:
        """A gradient of so many bytes that DDP would have averaged."""
        self.count_plain(ring_bytes(num_bytes, self._num_workers))

    def reduced_by_fsdp(self, kind: str, num_bytes: int) -> None:
        """A part of the gradient that takes the bytes of a reduce-scatter."""
        if self.is_over:
            self.begin_step()  # in backward(), before optimizer.step()
        sent = (self._num_workers - 1) * num_bytes // self._num_workers
        self.count(kind, sent)
        self.count_plain(sent)

    def gathered(self, kind: str, num_bytes: int) -> None:
        """An all-gather of so many bytes a worker."""
        self.count(kind, (self._num_workers - 1) * num_bytes)

    def passed_on(self, kind: str, num_bytes: int) -> None:
        """A broadcast of so many bytes, from worker to worker."""
        is_last = self._worker == self._num_workers - 1
        self.count(kind, 0 if is_last else num_bytes)

    def stats(self, base: FilterStats) -> DistributedStats:
        """The record of a step, with the bytes of it."""
        sent = {kind: self._step[kind] for kind in KINDS}
        return DistributedStats(
            **asdict(base),
            worker=self._worker,
            num_workers=self._num_workers,
            sent=MappingProxyType(sent),
            bytes_sent=sum(sent.values()),
            total_bytes_sent=self._total,
            ddp_bytes=self._plain,
            total_ddp_bytes=self._total_plain,
        )


def ring_bytes(num_bytes: int, num_workers: int) -> int:
    """What each of P workers sends in a ring all-reduce: 2 (P − 1)/P of the bytes."""
    return -(-2 * (num_workers - 1) * num_bytes // num_workers)
