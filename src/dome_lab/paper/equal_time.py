"""Both arms after as many seconds, read off the curves of runs of as many epochs.

A filtered epoch takes longer, so when the unfiltered arm is at its end the filtered one
has trained for fewer epochs. Its score then is that of its last epoch that fits into
the time. Seconds are the processor's, the median over epochs and seeds: a mean would
count what else the machine did.
"""

import math
import statistics
from collections.abc import Sequence

from dome_lab.paper.claims import Claim, claim, paired
from dome_lab.paper.rows import Row
from dome_lab.paper.run import FILTERED, PLAIN
from dome_lab.paper.series import ends, number, select


def epochs_that_fit(filtered: Sequence[Row], plain: Sequence[Row], epochs: int) -> int:
    """How many filtered epochs take no longer than so many unfiltered ones."""
    return math.floor(epochs * _median_seconds(plain) / _median_seconds(filtered))


def judge_equal_time(
    figure: str,
    rows: Sequence[Row],
    timed: Sequence[Row],
    score: str,
    where: str = "",
) -> list[Claim]:
    """Whether the filter adds to the score in as many seconds.

    Args:
        figure: Short name of the figure.
        rows: Of both arms, of as many epochs.
        timed: Of unfiltered runs without a tracker, which tell the seconds.
        score: Column of what is to be high.
        where: Put before the name, such as "rate 100: ".

    Returns:
        One claim; none if no filtered epoch fits into the time.
    """
    filtered, plain = (select(rows, arm=arm) for arm in (FILTERED, PLAIN))
    epochs = int(number(plain[0], "epochs"))
    fitting = epochs_that_fit(filtered, timed, epochs)
    if not fitting:
        return []
    early = [row for row in filtered if number(row, "epoch") <= fitting]
    return [
        claim(
            figure,
            f"{where}ahead after as many seconds",
            f"After {fitting} filtered epochs, which take as long as {epochs} "
            "unfiltered ones, the filter adds to what is measured on test samples.",
            [paired("gain", ends(early, score), ends(plain, score), low=0)],
        )
    ]


def _median_seconds(rows: Sequence[Row]) -> float:
    return statistics.median(number(row, "processor_seconds") for row in rows)
