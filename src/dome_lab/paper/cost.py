"""What runs cost: how much time is left, and how much a plan would take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dome_lab.paper.rows import TRAINING, Key, Row, seconds_of
from dome_lab.paper.run import Run

# Fitted to the rows in docs/results/cpu, one core of two: seconds of a sample without
# the filter, and how much larger a model's filter is than ResNet-8's. ResNet-18 from
# three steps of B = 64 on Tiny ImageNet, unfiltered and with k = 20.
SAMPLE_SECONDS = {
    "resnet8": 1.0e-3,
    "transformer": 1.25e-3,
    "mlp": 1.4e-5,
    "resnet18": 0.036,
}
FILTER_SIZE = {"transformer": 4.6, "mlp": 14.0, "resnet18": 4.3}
USUAL_SECONDS = 1.0e-3
NUM_SAMPLES = {"mnist": 60_000, "cifar10": 50_000, "tiny_imagenet": 100_000}
USUAL_SAMPLES = 20_000  # of the others


@cache
def kind_of(key: Key) -> Key:
    """The key of all runs that take as long as this one."""
    made_by, run = key
    rate = None if run.rate is None else 1.0
    # Removing the span costs little beside following it.
    removes = "span" if run.removes == "nothing" else run.removes
    same = replace(
        run,
        seed=0,
        lr=1.0,
        forget=None,
        rate=rate,
        removes=removes,
        split="test",
    )
    return made_by, same


def guessed_seconds(run: Run) -> float:
    """What the training of a run takes in one process, before anything is measured.

        N (1 + c (0.5 + 0.006 K + 0.0005 K²/B) / update_every) seconds of a sample

    for N samples in all epochs and a filter c times as large as that of ResNet-8.
    """
    K, B = run.rank or 0, run.batch_size
    size = FILTER_SIZE.get(run.model, 1.0) if K else 0.0
    filtering = size * (0.5 + 0.006 * K + 0.0005 * K**2 / B) / run.update_every
    samples = run.num_train or NUM_SAMPLES.get(run.task, USUAL_SAMPLES)
    seconds = SAMPLE_SECONDS.get(run.model, USUAL_SECONDS)
    return samples * run.epochs * seconds * (1 + filtering)


@dataclass(slots=True)
class _Seen:
    """Seconds of runs of a kind, and how many whole runs they were."""

    seconds: float = 0.0
    share: float = 0.0

    def add(self, seconds: float, share: float) -> None:
        self.seconds += seconds
        self.share += share


class TimeLeft:
    """Estimates the rest: from what runs of a kind took, else from ``guessed_seconds``.

    What has been seen in this session corrects all estimates by one factor: how much
    longer it took than was estimated.

    Args:
        keys: The runs to do.
        num_workers: How many are done at a time.
    """

    def __init__(self, keys: Iterable[Key], num_workers: int) -> None:
        self._left = dict.fromkeys(keys, 1.0)
        self._num_workers = num_workers
        self._before: dict[Key, _Seen] = {}
        self._now: dict[Key, _Seen] = {}
        self._done = 0.0

    def add_new(self, key: Key) -> None:
        """A run that came up on the way, if it is one, is to be done too."""
        self._left.setdefault(key, 1.0)

    def learn_from(self, found: Mapping[Key, Sequence[Row]]) -> None:
        """Take into account what runs of earlier sessions say they took."""
        for key, rows in found.items():
            self._before.setdefault(kind_of(key), _Seen()).add(seconds_of(rows), 1.0)

    def advance(self, key: Key, seconds: float, share: float) -> None:
        """So large a share of a run to do has been done now."""
        self._now.setdefault(kind_of(key), _Seen()).add(seconds, share)
        self._left[key] = max(0.0, self._left[key] - share)
        self._done += seconds

    def finish(self, key: Key, seconds: float = 0.0) -> None:
        """A run to do is over; so many seconds of it were not told before."""
        seen = self._now.setdefault(kind_of(key), _Seen())
        seen.add(seconds, self._left[key])
        self._left[key] = 0.0

    @property
    def seconds(self) -> float:
        """Time left."""
        left = [share * self._estimate(key) for key, share in self._left.items()]
        # The last runs cannot be divided among processes.
        return max(sum(left) / self._num_workers, max(left, default=0.0))

    @property
    def share_done(self) -> float:
        """How much of the work is behind, in [0, 1]."""
        left = sum(share * self._estimate(key) for key, share in self._left.items())
        total = self._done + left
        return self._done / total if total > 0 else 0.0

    def _estimate(self, key: Key) -> float:
        """Seconds of a whole run, in one process."""
        now = self._now.get(kind_of(key), _Seen())
        if now.share > 0:
            return now.seconds / now.share
        return self._expected(key) * self._correction()

    def _expected(self, key: Key) -> float:
        """The same, as if this session had not begun."""
        before = self._before.get(kind_of(key), _Seen())
        if before.share > 0:
            return before.seconds / before.share
        return guessed_seconds(key[1])

    def _correction(self) -> float:
        seen = {kind: now for kind, now in self._now.items() if now.share > 0}
        expected = sum(now.share * self._expected(kind) for kind, now in seen.items())
        taken = sum(now.seconds for now in seen.values())
        return taken / expected if expected > 0 and taken > 0 else 1.0


def share_of_row(key: Key) -> float:
    """How much of a run a row stands for; 0 where rows do not come one an epoch."""
    made_by, run = key
    return 1 / run.epochs if made_by == TRAINING else 0.0
