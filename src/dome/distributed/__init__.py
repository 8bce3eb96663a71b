"""The filter across ``torch.distributed`` workers."""

from dome.distributed.attachment import DistributedFilter, attach
from dome.distributed.compressed import CompressedFilter
from dome.distributed.directions import DirectionsFilter
from dome.distributed.fully_sharded import FullyShardedFilter
from dome.distributed.sharded import ShardedFilter
from dome.distributed.traffic import DistributedStats

__all__ = [
    "CompressedFilter",
    "DirectionsFilter",
    "DistributedFilter",
    "DistributedStats",
    "FullyShardedFilter",
    "ShardedFilter",
    "attach",
]
