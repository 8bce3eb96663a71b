"""Trackers follow the leading eigenspace of a stream of gradient samples."""

from dome.trackers.power import StreamingPower
from dome.trackers.protocol import Tracker, Update
from dome.trackers.svd import IncrementalSVD

TRACKERS = {"power": StreamingPower, "svd": IncrementalSVD}

__all__ = ["TRACKERS", "IncrementalSVD", "StreamingPower", "Tracker", "Update"]
