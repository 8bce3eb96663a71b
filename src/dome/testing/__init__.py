"""What the filter relies on in a tracker, a compressor or a rule of your own.

    from dome.testing import TRACKER_CHECKS

    @pytest.mark.parametrize("check", TRACKER_CHECKS)
    def test_my_tracker(check):
        check(lambda dim, rank: MyTracker(dim, rank))

A check raises ``AssertionError``. ``check_tracker`` and ``check_compressor`` run all of
them without pytest. What dome's own classes do besides is tested in its repository.
"""

from dome.testing.compressors import COMPRESSOR_CHECKS, check_compressor
from dome.testing.rules import check_rule
from dome.testing.trackers import TRACKER_CHECKS, check_tracker

__all__ = [
    "COMPRESSOR_CHECKS",
    "TRACKER_CHECKS",
    "check_compressor",
    "check_rule",
    "check_tracker",
]
