"""Figures whose later runs depend on what their earlier ones gave.

Such a figure has, beside ``runs(config)``, a function ``later_runs(config, found)`` of
the finished runs: it gives all runs that these call for, whether they are there already
or not. It is asked again whenever a run is over, and the figure is complete when all
that was asked for is there. Stopped and started again, the same rows ask for the same
runs.
"""

from collections.abc import Callable, Mapping, Sequence

from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run

Found = Mapping[Run, Sequence[Row]]  # the rows of finished runs
LaterRuns = Callable[[Found], list[Run]]


def runs_so_far(
    first: Sequence[Run],
    later_runs: LaterRuns | None,
    rows_of: Callable[[Run], Sequence[Row] | None],
) -> list[Run]:
    """All runs of a figure that can be told by now, those of later stages first.

    Later ones come first so that a question once begun is answered before the next.

    Args:
        first: The runs that depend on nothing.
        later_runs: The runs that finished ones call for; None if there are none ever.
        rows_of: The rows of a run, None if it is not finished.
    """
    later: list[Run] = []
    while True:
        known = dict.fromkeys([*later, *first])
        if later_runs is None:
            return list(known)
        there = {run: rows for run in known if (rows := rows_of(run)) is not None}
        wanted = [run for run in later_runs(there) if run not in known]
        if not wanted:
            return list(known)
        later += dict.fromkeys(wanted)
