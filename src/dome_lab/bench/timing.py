"""Seconds of several variants of the same work, measured side by side.

Other work on the machine slows every variant of a round alike. So variants take turns
in one process, ratios are taken within a round, and only then the median over rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Round = dict[str, float]
Clock = Callable[[], float]
Tell = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do the work.

    Attributes:
        name: Key of its seconds in a round.
        step: Does the work once.
        num_steps: Consecutive steps in one measurement, which is their average.
        num_settle: Steps before each measurement that are not timed: they bring this
            variant's data back into the caches.
        num_warmup: Steps before the first round.
    """

    name: str
    step: Callable[[], object]
    num_steps: int = 1
    num_settle: int = 1
    num_warmup: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long to measure.

    Attributes:
        seconds: No new round is begun after this time, warm-up included.
        least: Rounds that are measured in any case.
        most: Rounds that are enough.
    """

    seconds: float
    least: int = 5
    most: int = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a list of numbers."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


class CudaClock:
    """Seconds by CUDA events, read when the device has done all it was given to do.

    What is between two readings is the device's own time from the first of its kernels
    to the last, and its waiting for the host where the host is slower.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._seconds = 0.0
        self._last = self._event()

    def __call__(self) -> float:
        """Seconds since it was made."""
        event = self._event()
        # From reading to reading: torch has them in float32 milliseconds, which over
        # the minutes of a question would be too coarse for a step.
        self._seconds += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        return event


def clock_of(device: str) -> Clock:
    """A clock for work on a device: of the host for what the host does itself."""
    on_cuda = torch.device(device).type == "cuda"
    return CudaClock(device) if on_cuda else time.perf_counter


def measure(
    variants: Sequence[Variant],
    pace: Pace,
    tell: Tell,
    clock: Clock = time.perf_counter,
) -> list[Round]:
    """Seconds of one step of every variant, round by round.

    Args:
        variants: Run one after the other in every round, in this order.
        pace: How long to go on.
        tell: Is given the share of the work that is done, after every round.
        clock: Seconds, from anywhere.
    """
    begin = clock()
    for variant in variants:
        _repeat(variant.step, variant.num_warmup)
    rounds: list[Round] = []
    while len(rounds) < pace.most:
        late = clock() - begin >= pace.seconds
        if late and len(rounds) >= pace.least:
            break
        rounds.append({v.name: _seconds(v, clock) for v in variants})
        by_time = (clock() - begin) / pace.seconds if pace.seconds else 1.0
        by_count = len(rounds) / pace.least
        tell(min(1.0, max(len(rounds) / pace.most, min(by_time, by_count))))
    return rounds


def _seconds(variant: Variant, clock: Clock) -> float:
    _repeat(variant.step, variant.num_settle)
    start = clock()
    _repeat(variant.step, variant.num_steps)
    return (clock() - start) / variant.num_steps


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def seconds_of(rounds: Sequence[Round], name: str) -> list[float]:
    """One variant's seconds, in order."""
    return [r[name] for r in rounds]


def ratios(rounds: Sequence[Round], name: str, baseline: str) -> list[float]:
    """One variant's seconds over those of the baseline in the same round."""
    return [r[name] / r[baseline] for r in rounds]


def compared(rounds: Sequence[Round], name: str, baseline: str) -> dict[str, Any]:
    """What a row says of a variant: its seconds, and these over the baseline's."""
    seconds = seconds_of(rounds, name)
    own, ratio = spread(seconds), spread(ratios(rounds, name, baseline))
    return {
        "variant": name,
        "num_rounds": len(rounds),
        "median": own.median,
        "low": own.low,
        "high": own.high,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "seconds": seconds,
    }


@dataclass(frozen=True, kw_only=True)
class Config:
    """A network, a rank and batch sizes; ``pace`` is that of one batch size."""

    pace: Pace
    setting: str = "resnet8"
    rank: int = 100
    batch_sizes: Sequence[int] = (16, 128)
    device: str = "cpu"

    def expected_seconds(self, beside: float = 0.0) -> float:
        """About how long all sizes take, with what each takes beside measuring."""
        return len(self.batch_sizes) * (beside + self.pace.seconds)


SMOKE = Config(
    setting="resnet8 on 8x8",
    rank=3,
    batch_sizes=(5,),
    pace=Pace(seconds=0, least=2),
)
