"""``DistributedStats``: what a step did, and what a worker has sent for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dome.diagnostics import FilterStats

# What bytes may be for.
KINDS = ("control", "sums", "samples", "gradient", "messages", "basis", "buffers")

# What sends fewer, where most bytes are for one of them.
WAYS_OUT = {
    "control": "a larger model has as many of them",
    "sums": "a smaller rank=... sends fewer, a larger update_every=... less often",
    "samples": (
        'samples="worker" sends as many as DDP with one backward() in a step, '
        "compressor=... fewer, and with update_every=n samples travel in every n-th "
        "step only; after=... changes nothing of what is sent"
    ),
    "gradient": "compressor=... sends fewer",
    "messages": (
        "a higher rate sends fewer, and a linear compressor (HadamardSketch, PowerSGD) "
        "as many for any number of workers"
    ),
    "basis": "a larger share=... sends it less often",
    "buffers": "broadcast_buffers=False of DDP does not send them",
}


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
