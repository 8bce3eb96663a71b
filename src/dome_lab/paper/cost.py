"""What runs cost: how much time is left, and how much a plan would take."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import dome
from dome_lab.paper.models import MODELS
from dome_lab.paper.outliers import CURVATURE_SAMPLES
from dome_lab.paper.rows import TRAINING, Key, Row
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run, load_run_task

NUM_TIMED_STEPS = 5
TIMED_SECONDS = 2.0  # stop timing after so long, but not before the second step
TIMED_BATCH = 32  # at most: the time of larger ones is proportional to their size

# Where nothing is measured yet. Against a sample of ResNet-8 without the filter:
MODEL_COST = {"resnet18": 100.0}
USUAL_SAMPLES = 50_000


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


def guessed_cost(run: Run) -> float:
    """What a run costs against others, roughly and in no unit."""
    k, B = run.rank or 0, run.batch_size
    filtering = 0.0 if run.rank is None else 1 + 0.01 * k * (1 + k / B)
    samples = (run.num_train or USUAL_SAMPLES) * run.epochs
    return samples * MODEL_COST.get(run.model, 1.0) * (1 + filtering / run.update_every)


class TimeLeft:
    """Estimates the rest from what has been seen, kind by kind.

    Args:
        keys: The runs to do.
        num_workers: How many are done at a time.
    """

    def __init__(self, keys: Iterable[Key], num_workers: int) -> None:
        self._left = dict.fromkeys(keys, 1.0)
        self._num_workers = num_workers
        self._seconds: dict[Key, float] = {}
        self._shares: dict[Key, float] = {}
        self._done = 0.0

    def add_new(self, key: Key) -> None:
        """A run that came up on the way, if it is one, is to be done too."""
        self._left.setdefault(key, 1.0)

    def learn(self, key: Key, seconds: float, share: float = 1.0) -> None:
        """Take into account that so large a share of such a run took so long."""
        kind = kind_of(key)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
        self._shares[kind] = self._shares.get(kind, 0.0) + share

    def learn_from(self, found: Mapping[Key, Sequence[Row]]) -> None:
        """Take into account what runs of earlier sessions say they took."""
        for key, rows in found.items():
            self.learn(key, seconds_of(rows))

    def advance(self, key: Key, seconds: float, share: float) -> None:
        """So large a share of a run to do has been done now."""
        self.learn(key, seconds, share)
        self._left[key] = max(0.0, self._left[key] - share)
        self._done += seconds

    def finish(self, key: Key) -> None:
        """A run to do is over, whatever its rows said."""
        self.learn(key, 0.0, self._left[key])
        self._left[key] = 0.0

    @property
    def seconds(self) -> float:
        """Time left; NaN as long as nothing is known."""
        left = [share * self._estimate(key) for key, share in self._left.items()]
        # The last runs cannot be divided among processes.
        return max(sum(left) / self._num_workers, max(left, default=0.0))

    @property
    def share_done(self) -> float:
        """How much of the work is behind, in [0, 1]; 0 as long as nothing is known."""
        left = sum(share * self._estimate(key) for key, share in self._left.items())
        total = self._done + left
        return self._done / total if total > 0 else 0.0

    def _estimate(self, key: Key) -> float:
        """Seconds of a whole run, in one process."""
        kind = kind_of(key)
        if self._shares.get(kind, 0.0) > 0:
            return self._seconds[kind] / self._shares[kind]
        seen = sum(share * guessed_cost(k[1]) for k, share in self._shares.items())
        if seen == 0:
            return math.nan
        return guessed_cost(key[1]) * sum(self._seconds.values()) / seen


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one run would take in one process.

    Attributes:
        seconds: Of training, without evaluation; NaN if it does not fit into memory.
        memory: Bytes beside the model and its activations.
    """

    seconds: float
    memory: int


class _Enough(Exception):  # noqa: N818 - not an error
    """Stops a run that is only timed."""


def predict(run: Run) -> Prediction:
    """Time a few real steps on few samples, and a piece of the filter's update."""
    task = load_run_task(run)
    update, memory = 0.0, 0
    if run.removes == "hessian":
        update = _eigenvector_seconds(run, len(task.train_x)) / run.update_every
    elif run.rank is not None:
        rank = run.rank + run.oversample
        plan = dome.plan(MODELS[run.model](task), rank, run.batch_size)
        choice = next(c for c in plan.choices if c.layout == run.layout)
        update, memory = choice.seconds / run.update_every, choice.memory
        if not choice.fits:
            return Prediction(math.nan, memory)
    num_steps = len(task.train_x) // run.batch_size * run.epochs
    step = run.batch_size * _sample_seconds(_small(run)) + update
    return Prediction(num_steps * step, memory)


def _eigenvector_seconds(run: Run, num_train: int) -> float:
    """What the Hessian's leading eigenvectors take once, roughly."""
    samples = min(CURVATURE_SAMPLES, num_train)
    # About four products a vector, each of about two gradients.
    return 8 * (run.rank or 0) * samples * _sample_seconds(_small(run))


def _small(run: Run) -> Run:
    """A run that takes as long for a sample, without the update of a large basis."""
    return Run(
        task=run.task,
        model=run.model,
        seed=0,
        batch_size=min(run.batch_size, TIMED_BATCH),
        epochs=1,
        num_train=run.num_train,
        num_test=run.num_test,
        num_classes=run.num_classes,
        rank=None if run.rank is None or run.removes == "hessian" else 1,
    )


@cache
def _sample_seconds(run: Run) -> float:
    times = [time.perf_counter()]

    def tell(*_: int) -> None:
        times.append(time.perf_counter())
        late = len(times) > 2 and times[-1] - times[1] > TIMED_SECONDS
        if len(times) > 1 + NUM_TIMED_STEPS or late:
            raise _Enough

    with suppress(_Enough):
        next(compute_run(run, tell))
    # The first step is slow to start, and the samples are loaded before it.
    first = 1 if len(times) > 2 else 0
    step = (times[-1] - times[first]) / (len(times) - 1 - first)
    return step / run.batch_size


def seconds_of(rows: Iterable[Row]) -> float:
    """How long rows took to compute, together."""
    taken = (row.get("seconds") for row in rows)
    return math.fsum(s for s in taken if isinstance(s, int | float))


def share_of_row(key: Key) -> float:
    """How much of a run a row stands for; 0 where rows do not come one an epoch."""
    made_by, run = key
    return 1 / run.epochs if made_by == TRAINING else 0.0
