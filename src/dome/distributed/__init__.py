"""The filter across ``torch.distributed`` workers."""

from dome.distributed.attachment import attach
from dome.distributed.compressed import CompressedFilter
from dome.distributed.fully_sharded import FullyShardedFilter
from dome.distributed.sharded import ShardedFilter
from dome.distributed.traffic import DistributedStats

__all__ = [
    "CompressedFilter",
    "DistributedStats",
    "FullyShardedFilter",
    "ShardedFilter",
    "attach",
]
