"""Trackers follow the leading eigenspace of a stream of gradient samples."""

from collections.abc import Callable

from dome.trackers.power import StreamingPower
from dome.trackers.protocol import Tracker, Update
from dome.trackers.svd import IncrementalSVD

TRACKERS: dict[str, Callable[..., Tracker]] = {
    "power": StreamingPower,
    "svd": IncrementalSVD,
}

__all__ = ["TRACKERS", "IncrementalSVD", "StreamingPower", "Tracker", "Update"]
