"""The filter across ``torch.distributed`` workers."""

from dome.distributed.attachment import attach
from dome.distributed.comm_hook import HookState, hook
from dome.distributed.traffic import DistributedStats

__all__ = ["DistributedStats", "HookState", "attach", "hook"]
