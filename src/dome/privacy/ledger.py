"""How many steps were paid for, in numbers that only grow.

Every filter counts the steps of its own run. A state holds the counts of all runs that
led to it, and loading one keeps the larger count of each: going back to an older state
takes nothing back, because what those steps released stays released.
"""

import math
import os
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from dome.privacy.digests import digest

Row = tuple[float, float, int]  # noise multiplier, sample rate, number of steps

# The largest counts of this process, so that a filter made anew knows them as well.
_seen: dict[int, Row] = {}


class Ledger:
    """Counts the steps of a run, and of those runs that it goes on from.

    Args:
        noise_multiplier: σ of a step of this run.
        sample_rate: Probability that a sample is in a batch, in this run.
    """

    def __init__(self, noise_multiplier: float, sample_rate: float) -> None:
        self._own = int.from_bytes(os.urandom(8)) >> 1  # fits an int64
        self._runs: dict[int, Row] = {self._own: (noise_multiplier, sample_rate, 0)}

    @property
    def num_steps(self) -> int:
        """Steps of all runs."""
        return sum(steps for _, _, steps in self._runs.values())

    def add(self) -> None:
        """One more step of this run."""
        self._runs = self._with(1)
        _seen[self._own] = self._runs[self._own]

    def history(self, num_more: int = 0) -> list[Row]:
        """The steps so far and this many more of this run, as Opacus lists them."""
        total: dict[tuple[float, float], int] = {}
        for sigma, rate, steps in self._with(num_more).values():
            total[sigma, rate] = total.get((sigma, rate), 0) + steps
        return [(sigma, rate, steps) for (sigma, rate), steps in total.items() if steps]

    def _with(self, num_more: int) -> dict[int, Row]:
        sigma, rate, steps = self._runs[self._own]
        return self._runs | {self._own: (sigma, rate, steps + num_more)}

    def state_dict(self, num_more: int = 0) -> dict[str, Tensor]:
        """Rows of multiplier, rate and number of steps, and which run each is of."""
        runs = self._with(num_more)
        rows = torch.tensor(list(runs.values()), dtype=torch.float64)
        return {"history": rows, "runs": torch.tensor(list(runs))}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """This ledger with the runs of a saved one; what is damaged is refused."""
        rows = state["history"].reshape(-1, 3).tolist()
        # Versions that had no runs: the same rows are the same run.
        runs = [digest(torch.tensor([*row, i])) for i, row in enumerate(rows)]
        runs = state["runs"].tolist() if "runs" in state else runs
        merged = type(self)(*self._runs[self._own][:2])
        merged._own, merged._runs = self._own, dict(self._runs)
        for run, row in zip(runs, rows, strict=True):
            known = [merged._runs.get(run), _seen.get(run), _checked(row)]
            merged._runs[run] = max((r for r in known if r), key=lambda r: r[2])
        return merged


def _checked(row: list[float]) -> Row:
    sigma, rate, steps = row
    if not (0 < sigma < math.inf and 0 < rate <= 1 and steps >= 0 and steps % 1 == 0):
        raise ValueError(
            f"the checkpoint says that {steps} steps were taken with noise multiplier "
            f"{sigma} and sample rate {rate}, which cannot be: it is damaged, and "
            f"nothing was loaded"
        )
    return sigma, rate, int(steps)
